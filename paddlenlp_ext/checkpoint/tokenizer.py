"""Tokenizers: `transformers` in its PyTorch-free part, from a Hugging Face folder or out of a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paddlenlp_ext.checkpoint.gguf import open_gguf
from paddlenlp_ext.checkpoint.hub import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        name_or_path: whatever `resolve_model` takes.

    Returns:
        A transformers tokenizer; its `chat_template` is the model's own, if it has one. Where the model names no
        padding token, the end-of-text token pads; labels say what is learned, so as text it is still learned.

    Raises:
        ValueError: no such model, no tokenizer files, or files that transformers can't read.
    """
    path = resolve_model(name_or_path)
    tokenizer = _from_gguf(path) if path.is_file() else _from_folder(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class AutoTokenizer:
    """`AutoTokenizer.from_pretrained(name_or_path)`, the spelling that users of transformers and PaddleNLP know."""

    @staticmethod
    def from_pretrained(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
        """See `load_tokenizer`."""
        return load_tokenizer(name_or_path)


def _from_gguf(file: Path) -> PreTrainedTokenizerBase:
    from paddlenlp_ext.checkpoint.gguf.tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(open_gguf(file))


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder}: no tokenizer there (looked for {', '.join(_TOKENIZER_FILES)})")
    # Its only advice on import is that PyTorch is absent, as it may be here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer as TransformersTokenizer

    try:
        return TransformersTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{folder}: transformers can't read the tokenizer there: {error}") from error
