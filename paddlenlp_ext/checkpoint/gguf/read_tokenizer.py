"""Build a transformers fast tokenizer from a GGUF file: byte-level BPE and SentencePiece BPE.

The keys are those of the `tokenizer.ggml.*` section of the format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). `tokenizer.ggml.pre` names the rule that splits text into
words before byte-pair merging. The rule is part of the model, so an unknown name is an error, never a guess.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import WordRule, adds_bos_by_default, word_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORD_MARK = "\u2581"
"""Character that stands for a space in SentencePiece's pieces."""
_MAX_TOKEN_LENGTH = 1024


def default_add_bos(file: GgufFile) -> bool:
    """Return True if llama.cpp puts bos before a text when the file does not specify it."""
    if file.require("tokenizer.ggml.model", str) == "llama":
        return True
    return adds_bos_by_default(file.get("tokenizer.ggml.pre", str))


def byte_level_bpe(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Build byte-level BPE, as introduced by GPT-2, with the file's own rule for splitting words.

    Raises:
        ValueError: the file names no rule or an unknown one, or a merge is not one of two tokens into a token.
    """
    rule = _rule_of(file)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for index, merge in enumerate(file.require_list("tokenizer.ggml.merges", str)):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.merges[{index}] is {merge!r}, which does not join two tokens into a "
                "token; the file is damaged"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
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


def _rule_of(file: GgufFile) -> WordRule:
    try:
        return word_rule(file.get("tokenizer.ggml.pre", str))
    except ValueError as error:
        raise ValueError(
            f"{file.path}: {error}; use the model's folder with its tokenizer.json, or a GGUF file with a known rule"
        ) from error


def sentencepiece_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Build SentencePiece BPE: merge the pair with the highest-scoring piece first; encode the rest as bytes.

    The file stores no merges; they follow from the pieces and their scores.

    Raises:
        ValueError: not every piece has a score, or the id of the unknown piece is out of range.
    """
    scores = file.require_list("tokenizer.ggml.scores", float)
    _check_length(file, "scores", scores)
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"{file.path}: tokenizer.ggml.scores has values that are not finite; the file is damaged")
    unknown = file.get("tokenizer.ggml.unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.unknown_token_id is {unknown}, outside {len(tokens)} tokens")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, types),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", WORD_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), spaces]) if prefix else spaces
    parts = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that join into a piece, best first.

    Control, unknown and byte pieces (types 2, 3, 6) neither join nor result from joining: text never produces them.
    """
    rank = {
        token: (-score, i)
        for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=False))
        if kind not in (2, 3, 6)
    }
    pairs = [
        (rank[token], token[:split], token[split:])
        for token in rank
        for split in range(1, len(token))
        if token[:split] in rank and token[split:] in rank
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a file; transformers can load it once it is saved.

    Raises:
        ValueError: the file has no tokenizer, its kind is not supported, or its parts do not fit together.
    """
    kind = file.require("tokenizer.ggml.model", str)
    tokens, types = _vocabulary(file)
    if kind == "gpt2":
        tokenizer = byte_level_bpe(file, tokens)
    elif kind == "llama":
        tokenizer = sentencepiece_bpe(file, tokens, types)
    else:
        raise ValueError(f"{file.path}: tokenizer kind {kind!r} is not supported; known: gpt2, llama (SentencePiece)")
    _add_special_tokens(tokenizer, tokens, types)
    special = _named_tokens(file, tokens)
    _add_bos_and_eos(tokenizer, file, special)
    return _wrap(tokenizer, file, special)


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return tokens and their types, without the unused last ones, which only pad the embedding to a round size.

    Raises:
        ValueError: no tokens, more tokens than rows of the embedding, a token that occurs twice, or other types.
    """
    tokens = file.require_list("tokenizer.ggml.tokens", str)
    key = "tokenizer.ggml.token_type"
    types = file.require_list(key, int) if key in file.metadata else [int(TokenType.NORMAL)] * len(tokens)
    _check_length(file, "token_type", types)
    unknown = next((kind for kind in types if kind not in set(TokenType)), None)
    if unknown is not None:
        raise ValueError(f"{file.path}: {key} has the value {unknown}, outside 1 to 6; the file is damaged")
    count = len(tokens)
    while count and types[count - 1] == TokenType.UNUSED:
        count -= 1
    tokens, types = tokens[:count], types[:count]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and count > embedding.shape[0]:
        raise ValueError(f"{file.path}: {count} tokens, but token_embd.weight has {embedding.shape[0]} rows")
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN_LENGTH:  # merges are found in a time that grows with the square of the length
        raise ValueError(f"{file.path}: a token has {longest} characters, more than {_MAX_TOKEN_LENGTH}")
    first_at: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first_at.setdefault(token, index) != index:
            raise ValueError(f"{file.path}: tokenizer.ggml.tokens[{index}] is {token!r} again; the file is damaged")
    if not tokens:
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens is empty; use another file of the model")
    return tokens, types


def _check_length(file: GgufFile, name: str, values: Sequence[object]) -> None:
    count = len(file.require_list("tokenizer.ggml.tokens", str))
    if len(values) != count:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{name} has {len(values)} values for {count} tokens; the file is damaged"
        )


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Register control tokens and user-defined tokens.

    Control tokens are matched verbatim in text and skipped when decoding; user-defined tokens are plain text.
    """
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
    # A SentencePiece word mark stands for a space, so such a token must be matched after normalization.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized="\u2581" in t) for t in user])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Return the bos, eos, unk and pad tokens by transformers' argument names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for argument, key in keys.items():
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"{file.path}: tokenizer.ggml.{key}_token_id is {token_id}, outside {len(tokens)} tokens")
        found[argument] = tokens[token_id]
    return found


def _add_bos_and_eos(tokenizer: Tokenizer, file: GgufFile, special: dict[str, str]) -> None:
    """Add bos before and eos after every text if the file requests it.

    Raises:
        ValueError: the file requests a token that it does not name.
    """
    requested = {
        "bos_token": file.get("tokenizer.ggml.add_bos_token", bool, default_add_bos(file)),
        "eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    for name, add in requested.items():
        if add and name not in special:
            key = f"tokenizer.ggml.{name.removesuffix('_token')}_token_id"
            raise ValueError(f"{file.path}: {name} is added to every text, but the metadata has no {key}")
    ends = {name: special[name] for name, add in requested.items() if add}
    if not ends:
        return
    single = [ends.get("bos_token"), "$A", ends.get("eos_token")]
    single = [part for part in single if part]
    pair = [f"{part}:1" if part != "$A" else "$B:1" for part in single]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(single),
        pair=" ".join(single + pair),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends.values())],
    )


def _wrap(tokenizer: Tokenizer, file: GgufFile, special: dict[str, str]) -> PreTrainedTokenizerFast:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=file.get(file.architecture_key("context_length"), int, int(1e30)),
        **special,
    )
    wrapped.chat_template = file.get("tokenizer.chat_template", str)
    return wrapped
