"""Build a transformers fast tokenizer from a GGUF file: byte-level BPE or SentencePiece BPE.

The metadata key `tokenizer.ggml.pre` names the pre-tokenizer, which splits text into words before byte-pair merging.
An unknown name is an error, because another pre-tokenizer would return wrong tokens.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import word_rule
from paddlenlp_ext.checkpoint.gguf.tokenizer_fields import TokenizerFields, TokenType, read_tokenizer_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORD_MARK = "\u2581"
"""Character that stands for a space in SentencePiece tokens."""


def tokenizer_from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file.

    Raises:
        ValueError: the file has no tokenizer, or the tokenizer metadata is damaged or not supported.
    """
    fields = read_tokenizer_fields(file)
    tokenizer = _byte_level_bpe(fields) if fields.model == "gpt2" else sentencepiece_bpe(fields)
    _add_special_tokens(tokenizer, fields)
    _add_bos_and_eos(tokenizer, fields)
    wrapped = as_transformers_tokenizer(tokenizer, model_max_length=fields.max_length, **fields.special)
    wrapped.chat_template = fields.chat_template
    return wrapped


def as_transformers_tokenizer(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer in the transformers class; `options` are arguments of the class, such as `eos_token`."""
    # Hide transformers' warning that PyTorch is not installed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)


def _byte_level_bpe(fields: TokenizerFields) -> Tokenizer:
    """Build the byte-level BPE tokenizer of a file, with the pre-tokenizer that the file names.

    Raises:
        ValueError: the name of the pre-tokenizer is missing or unknown.
    """
    try:
        return byte_level_bpe(fields.pre, {token: index for index, token in enumerate(fields.tokens)}, fields.merges)
    except ValueError as error:
        raise ValueError(
            f"{fields.path}: {error}; use the model's folder with its tokenizer.json, or a GGUF file with a known "
            "pre-tokenizer"
        ) from error


def byte_level_bpe(pre: str | None, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Build a byte-level BPE tokenizer, as introduced by GPT-2.

    Args:
        pre: value of `tokenizer.ggml.pre`, the name of the pre-tokenizer.
        vocabulary: token -> token id.
        merges: pairs of tokens; earlier pairs are merged first.

    Raises:
        ValueError: `pre` is an unknown name or None.
    """
    rule = word_rule(pre)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignores_merges))
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(fields: TokenizerFields) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer from its merges or, for the kind "llama", from the scores of its tokens.

    With scores, the pair that forms the token with the highest score is merged first. Characters without a token are
    encoded as bytes.
    """
    has_merges = fields.model != "llama"
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(fields.tokens)},
            merges=fields.merges if has_merges else merges_from_scores(fields.tokens, fields.scores, fields.types),
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
    """Return all pairs of tokens that merge into another token, ordered by descending score of the merged token.

    Control, unknown and byte tokens are excluded, because they are neither merged nor the result of a merge.
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

    The tokenizer matches control tokens verbatim in the text and can skip them in decoded text. Decoding always keeps
    user-defined tokens.
    """
    typed = list(zip(fields.tokens, fields.types, strict=True))
    control = [token for token, kind in typed if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user = [token for token, kind in typed if kind == TokenType.USER_DEFINED]
    # A token with a SentencePiece word mark, which stands for a space, must be matched after normalization.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=WORD_MARK in token) for token in user])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])


def _add_bos_and_eos(tokenizer: Tokenizer, fields: TokenizerFields) -> None:
    """Make the tokenizer add bos before and eos after every text, as the two flags in the file specify."""
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
