"""The tokenizer inside a GGUF file, as a transformers fast tokenizer.

The keys are those of the `tokenizer.ggml.*` section of the format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The file names the rule that cuts text into words before
byte-pair merging (`tokenizer.ggml.pre`); that rule is part of the model, so an unknown name is an error, never a guess.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, processors

from paddlenlp_ext.checkpoint.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf_tokenizer_models import byte_level_bpe, default_add_bos, sentencepiece_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer; what it saves loads in transformers.

    Raises:
        ValueError: no tokenizer in the file, or of a kind that is not read.
    """
    kind = file.require("tokenizer.ggml.model")
    tokens = _without_filling(file)
    if kind == "gpt2":
        tokenizer = byte_level_bpe(file, tokens)
    elif kind == "llama":
        tokenizer = sentencepiece_bpe(file, tokens, _types(file)[: len(tokens)])
    else:
        raise ValueError(f"{file.path}: tokenizer kind {kind!r} is not read; known: gpt2, llama (SentencePiece)")
    _add_special_tokens(tokenizer, tokens, _types(file))
    special = _named_tokens(file, tokens)
    _add_ends(tokenizer, file, special, tokens)
    return _wrap(tokenizer, file, special)


def _types(file: GgufFile) -> list[int]:
    types = file.metadata.get("tokenizer.ggml.token_type")
    return types or [TokenType.NORMAL] * len(file.require("tokenizer.ggml.tokens"))


def _without_filling(file: GgufFile) -> list[str]:
    """The vocabulary without the unused entries at its end, which only fill the embedding up to a round size."""
    tokens, types = file.require("tokenizer.ggml.tokens"), _types(file)
    if len(tokens) != len(types):
        raise ValueError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; the file is damaged")
    count = len(tokens)
    while count and types[count - 1] == TokenType.UNUSED:
        count -= 1
    return tokens[:count]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are found in text as they stand and left out when decoding; user-defined ones are plain text."""
    control = [t for t, kind in zip(tokens, types, strict=False) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user = [t for t, kind in zip(tokens, types, strict=False) if kind == TokenType.USER_DEFINED]
    # A SentencePiece word mark stands for a space, so such a token has to be looked for after normalizing.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized="\u2581" in t) for t in user])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """bos, eos, unk and pad tokens by transformers' argument name."""
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


def _add_ends(tokenizer: Tokenizer, file: GgufFile, special: dict[str, str], tokens: list[str]) -> None:
    """Put bos before and eos after every text, where the file asks for it."""
    wanted = {
        "bos_token": file.metadata.get("tokenizer.ggml.add_bos_token", default_add_bos(file)),
        "eos_token": file.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {name: special[name] for name, add in wanted.items() if add and name in special}
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
