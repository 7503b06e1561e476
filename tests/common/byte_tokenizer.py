"""Tokenizer with one token per byte."""

from __future__ import annotations

from typing import Any


def byte_tokenizer(end: str, *others: str, letters: str | None = None) -> Any:
    """Return a tokenizer of transformers with a token for each byte, an end token, and other special tokens.

    Args:
        end: text of the end token.
        others: texts of the other special tokens.
        letters: bytes with a token, as ASCII characters; None: all bytes.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet() if letters is None else letters)
    core = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, additional_special_tokens=list(others))
