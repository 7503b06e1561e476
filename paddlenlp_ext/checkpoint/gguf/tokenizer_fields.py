"""Read and check the `tokenizer.ggml.*` metadata of a GGUF file.

The keys are specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import adds_bos_by_default

_PREFIX = "tokenizer.ggml."
_MAX_TOKEN_LENGTH = 1024
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Argument of transformers' tokenizers -> component of the metadata key with the token's id."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class TokenizerFields:
    """Checked tokenizer metadata of a GGUF file.

    Attributes:
        path: the file, for messages.
        model: gpt2 (byte-level BPE), llama (SentencePiece BPE) or gemma4 (SentencePiece BPE with merges).
        pre: name of the pre-tokenizer; None if the key is missing.
        tokens: the vocabulary, without the unused tokens at the end that pad the embedding.
        types: `TokenType` of each token.
        merges: merges of BPE, each a pair of tokens; empty for "llama".
        scores: score of each SentencePiece token of "llama".
        special: argument of transformers (`bos_token`, `eos_token`, `unk_token`, `pad_token`) -> token.
        unknown: unknown token of SentencePiece BPE.
        adds: `bos_token` and `eos_token` -> whether the tokenizer adds the token to every text.
        adds_space_prefix: whether a SentencePiece tokenizer adds a space before every text.
        chat_template: Jinja chat template; None if the key is missing.
        max_length: context length of the model.
    """

    path: Path
    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    scores: list[float]
    special: dict[str, str]
    unknown: str
    adds: dict[str, bool]
    adds_space_prefix: bool
    chat_template: str | None
    max_length: int


def read_tokenizer_fields(file: GgufFile) -> TokenizerFields:
    """Read and check the tokenizer metadata of a file.

    Raises:
        ValueError: a key is missing, a value is damaged, or the tokenizer model is not supported.
    """
    model = file.require(_PREFIX + "model", str)
    tokens, types = _vocabulary(file)
    if model not in ("gpt2", "llama", "gemma4"):
        raise ValueError(
            f"{file.path}: tokenizer kind {model!r} is not supported; known: gpt2, llama (SentencePiece), gemma4"
        )
    pre = file.get(_PREFIX + "pre", str)
    special = _special_tokens(file, tokens)
    return TokenizerFields(
        path=file.path,
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[] if model == "llama" else _merges(file, tokens),
        scores=_scores(file) if model == "llama" else [],
        special=special,
        unknown=tokens[_token_id(file, "unknown", tokens) or 0],
        adds=_added_tokens(file, special, model != "gpt2" or adds_bos_by_default(pre)),
        adds_space_prefix=file.get(_PREFIX + "add_space_prefix", bool, model == "llama"),
        chat_template=file.get("tokenizer.chat_template", str),
        max_length=file.get(file.architecture_key("context_length"), int, int(1e30)),
    )


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, without the unused tokens at the end.

    Raises:
        ValueError: the vocabulary is empty or larger than the embedding, or a token or type is invalid.
    """
    tokens, key = file.require_list(_PREFIX + "tokens", str), _PREFIX + "token_type"
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
        raise ValueError(
            f"{file.path}: {count} tokens, but token_embd.weight has {embedding.shape[0]} rows; the file is damaged"
        )
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN_LENGTH:  # the time of `merges_from_scores` grows with the square of the token length
        raise ValueError(f"{file.path}: a token has {longest} characters; the maximum is {_MAX_TOKEN_LENGTH}")
    first_at: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first_at.setdefault(token, index) != index:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.tokens[{index}] repeats the token {token!r}; the file is damaged"
            )
    if not tokens:
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens is empty; use a different GGUF file of this model")
    return tokens, types


def _check_length(file: GgufFile, name: str, values: Sequence[object]) -> None:
    count = len(file.require_list(_PREFIX + "tokens", str))
    if len(values) != count:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{name} has {len(values)} values for {count} tokens; the file is damaged"
        )


def _merges(file: GgufFile, tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges of BPE.

    Raises:
        ValueError: a merge does not join two tokens into a token.
    """
    vocabulary, merges = frozenset(tokens), []
    for index, merge in enumerate(file.require_list(_PREFIX + "merges", str)):
        left, _, right = merge.partition(" ")
        if not vocabulary.issuperset((left, right, left + right)):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.merges[{index}] is {merge!r}, which does not join two tokens into a "
                "token; the file is damaged"
            )
        merges.append((left, right))
    return merges


def _scores(file: GgufFile) -> list[float]:
    """Return the scores of SentencePiece tokens.

    Raises:
        ValueError: the number of scores is wrong, or a score is not finite.
    """
    scores = file.require_list(_PREFIX + "scores", float)
    _check_length(file, "scores", scores)
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"{file.path}: tokenizer.ggml.scores has values that are not finite; the file is damaged")
    return scores


def _token_id(file: GgufFile, name: str, tokens: Sequence[str]) -> int | None:
    """Return the id of a special token; None if the key is missing.

    Raises:
        ValueError: the id is outside the vocabulary.
    """
    token_id = file.get(f"{_PREFIX}{name}_token_id", int)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {token_id}, outside the vocabulary of {len(tokens)} tokens"
        )
    return token_id


def _special_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    ids = {argument: _token_id(file, name, tokens) for argument, name in _SPECIAL.items()}
    return {argument: tokens[token_id] for argument, token_id in ids.items() if token_id is not None}


def _added_tokens(file: GgufFile, special: Mapping[str, str], adds_bos: bool) -> dict[str, bool]:
    """Return a dict from `bos_token` and `eos_token` to whether the tokenizer adds the token to every text.

    Args:
        file: the file.
        special: special tokens of the file.
        adds_bos: whether llama.cpp adds bos if the key `add_bos_token` is missing.

    Raises:
        ValueError: the metadata specifies that a token is added, but lacks the id of the token.
    """
    adds = {
        "bos_token": file.get(_PREFIX + "add_bos_token", bool, adds_bos),
        "eos_token": file.get(_PREFIX + "add_eos_token", bool, False),
    }
    for name, is_added in adds.items():
        if is_added and name not in special:
            key = f"{_PREFIX}{name.removesuffix('_token')}_token_id"
            raise ValueError(f"{file.path}: {name} is added to every text, but the metadata has no {key}")
    return adds
