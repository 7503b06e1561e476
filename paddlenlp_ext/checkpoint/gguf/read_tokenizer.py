"""Build a transformers fast tokenizer from a GGUF file: byte-level BPE or SentencePiece BPE.

`tokenizer.ggml.pre` names the pre-tokenizer, which splits text into words before byte-pair merging. A tokenizer with
another pre-tokenizer returns other tokens, so an unknown name is an error.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import word_rule
from paddlenlp_ext.checkpoint.gguf.tokenizer_fields import TokenizerFields, TokenType, read_tokenizer_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORD_MARK = "\u2581"
"""Character that SentencePiece's pieces have in place of a space."""


def tokenizer_from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a file; transformers can load the tokenizer once it is saved.

    Raises:
        ValueError: the file has no tokenizer, or its metadata are damaged or not supported.
    """
    fields = read_tokenizer_fields(file)
    tokenizer = byte_level_bpe(fields) if fields.model == "gpt2" else sentencepiece_bpe(fields)
    _add_special_tokens(tokenizer, fields)
    _add_bos_and_eos(tokenizer, fields)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=fields.max_length,
        **fields.special,
    )
    wrapped.chat_template = fields.chat_template
    return wrapped


def byte_level_bpe(fields: TokenizerFields) -> Tokenizer:
    """Build byte-level BPE, as introduced by GPT-2, with the pre-tokenizer that the file names.

    Raises:
        ValueError: the file names no pre-tokenizer or an unknown one.
    """
    try:
        rule = word_rule(fields.pre)
    except ValueError as error:
        raise ValueError(
            f"{fields.path}: {error}; use the model's folder with its tokenizer.json, or a GGUF file with a known rule"
        ) from error
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(fields.tokens)},
            merges=fields.merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule.ignores_merges,
        )
    )
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(fields: TokenizerFields) -> Tokenizer:
    """Build SentencePiece BPE: merge the pair with the highest-scoring piece first; encode the rest as bytes.

    The file stores no merges; they are derived from the pieces and their scores.
    """
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(fields.tokens)},
            merges=merges_from_scores(fields.tokens, fields.scores, fields.types),
            unk_token=fields.unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix, spaces = fields.adds_space_prefix, normalizers.Replace(" ", WORD_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), spaces]) if prefix else spaces
    steps = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that merge into a piece, best first.

    Control, unknown and byte pieces are left out: they neither merge nor result from a merge.
    """
    left_out = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    rank = {
        token: (-score, index)
        for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=False))
        if kind not in left_out
    }
    pairs = [
        (rank[token], token[:split], token[split:])
        for token in rank
        for split in range(1, len(token))
        if token[:split] in rank and token[split:] in rank
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]


def _add_special_tokens(tokenizer: Tokenizer, fields: TokenizerFields) -> None:
    """Register control tokens and user-defined tokens.

    Control tokens are matched verbatim in text and skipped when decoding; user-defined tokens are plain text.
    """
    typed = list(zip(fields.tokens, fields.types, strict=True))
    control = [token for token, kind in typed if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user = [token for token, kind in typed if kind == TokenType.USER_DEFINED]
    # A SentencePiece word mark stands for a space, so such a token must be matched after normalization.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=WORD_MARK in token) for token in user])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])


def _add_bos_and_eos(tokenizer: Tokenizer, fields: TokenizerFields) -> None:
    """Add bos before and eos after every text if the file requests it."""
    ends = {name: fields.special[name] for name, is_added in fields.adds.items() if is_added}
    if not ends:
        return
    single = [part for part in (ends.get("bos_token"), "$A", ends.get("eos_token")) if part]
    pair = [f"{part}:1" if part != "$A" else "$B:1" for part in single]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(single),
        pair=" ".join(single + pair),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends.values())],
    )
