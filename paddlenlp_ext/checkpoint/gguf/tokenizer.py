"""Build a transformers fast tokenizer from a GGUF file: byte-level BPE and SentencePiece BPE.

The keys are those of the `tokenizer.ggml.*` section of the format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). `tokenizer.ggml.pre` names the rule that splits text into
words before byte-pair merging. The rule is part of the model, so an unknown name is an error, never a guess.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paddlenlp_ext.checkpoint.gguf import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WORD_MARK = "\u2581"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (  # llama.cpp's rule for files that name none
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_IGNORES_MERGES = (*_LLAMA3_NAMES, "tekken")  # words in the vocabulary are not split and merged
_BOS_BY_DEFAULT = (*_LLAMA3_NAMES, "tekken")


def default_add_bos(file: GgufFile) -> bool:
    """Return True if llama.cpp puts bos before a text when the file does not specify it."""
    if file.metadata["tokenizer.ggml.model"] == "llama":
        return True
    return file.metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT


def byte_level_bpe(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Build byte-level BPE, as introduced by GPT-2, with the file's own rule for splitting words.

    Raises:
        ValueError: the file names no rule or an unknown one.
    """
    rule = file.metadata.get("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule in _IGNORES_MERGES,
        )
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _word_rule(file, rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_rule(file: GgufFile, rule: str | None) -> pre_tokenizers.PreTokenizer:
    with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return with_regex
    if rule in ("smollm", "starcoder"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_regex])
    splits = {"qwen2": (_QWEN2,), "tekken": (_TEKKEN,), "default": _DEFAULT} | dict.fromkeys(_LLAMA3_NAMES, (_LLAMA3,))
    if rule not in splits:
        known = ", ".join(sorted(["gpt-2", "smollm", "starcoder", *splits]))
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre is {rule!r}, an unknown rule for splitting text into words "
            f"(known: {known}); use the model's folder with its tokenizer.json, or a GGUF file with a known rule"
        )
    patterns = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits[rule]]
    return pre_tokenizers.Sequence([*patterns, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Build SentencePiece BPE: merge the pair with the highest-scoring piece first; encode the rest as bytes.

    The file stores no merges; they follow from the pieces and their scores.
    """
    scores = file.require("tokenizer.ggml.scores")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, types),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _WORD_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_MARK), spaces]) if prefix else spaces
    parts = [decoders.Replace(_WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
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
        ValueError: the file has no tokenizer, or its kind is not supported.
    """
    kind = file.require("tokenizer.ggml.model")
    tokens = _without_padding_tokens(file)
    if kind == "gpt2":
        tokenizer = byte_level_bpe(file, tokens)
    elif kind == "llama":
        tokenizer = sentencepiece_bpe(file, tokens, _types(file)[: len(tokens)])
    else:
        raise ValueError(f"{file.path}: tokenizer kind {kind!r} is not supported; known: gpt2, llama (SentencePiece)")
    _add_special_tokens(tokenizer, tokens, _types(file))
    special = _named_tokens(file, tokens)
    _add_bos_and_eos(tokenizer, file, special, tokens)
    return _wrap(tokenizer, file, special)


def _types(file: GgufFile) -> list[int]:
    types = file.metadata.get("tokenizer.ggml.token_type")
    return types or [TokenType.NORMAL] * len(file.require("tokenizer.ggml.tokens"))


def _without_padding_tokens(file: GgufFile) -> list[str]:
    """Return the vocabulary without its unused last entries, which only pad the embedding to a round size."""
    tokens, types = file.require("tokenizer.ggml.tokens"), _types(file)
    if len(tokens) != len(types):
        raise ValueError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; the file is damaged")
    count = len(tokens)
    while count and types[count - 1] == TokenType.UNUSED:
        count -= 1
    return tokens[:count]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Register control tokens and user-defined tokens.

    Control tokens are matched verbatim in text and skipped when decoding; user-defined tokens are plain text.
    """
    control = [t for t, kind in zip(tokens, types, strict=False) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user = [t for t, kind in zip(tokens, types, strict=False) if kind == TokenType.USER_DEFINED]
    # A SentencePiece word mark stands for a space, so such a token must be matched after normalization.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized="\u2581" in t) for t in user])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Return the bos, eos, unk and pad tokens by transformers' argument names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for argument, key in keys.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"{file.path}: tokenizer.ggml.{key}_token_id is {token_id}, outside {len(tokens)} tokens")
        found[argument] = tokens[token_id]
    return found


def _add_bos_and_eos(tokenizer: Tokenizer, file: GgufFile, special: dict[str, str], tokens: list[str]) -> None:
    """Add bos before and eos after every text if the file requests it."""
    requested = {
        "bos_token": file.metadata.get("tokenizer.ggml.add_bos_token", default_add_bos(file)),
        "eos_token": file.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {name: special[name] for name, add in requested.items() if add and name in special}
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
        model_max_length=file.architecture_value("context_length", int(1e30)),
        **special,
    )
    wrapped.chat_template = file.metadata.get("tokenizer.chat_template")
    return wrapped
