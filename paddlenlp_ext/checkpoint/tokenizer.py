"""Load tokenizers with the PyTorch-free part of `transformers`, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.symlinks import check_links
from paddlenlp_ext.checkpoint.tokenizer_config import check_tokenizer_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        name_or_path: any name that `resolve_model` accepts.

    Returns:
        A transformers tokenizer with the chat template of the model, if it has one. Without a padding token, the
        end-of-text token is used for padding; labels select the target tokens, so an end-of-text token in the data
        remains a target.

    Raises:
        ValueError: the model does not exist, has no tokenizer files, or transformers cannot read them.
    """
    path = resolve_model(name_or_path)
    tokenizer = _from_gguf(path) if path.is_file() else _from_folder(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class AutoTokenizer:
    """Tokenizer loader with the spelling of transformers and PaddleNLP."""

    @staticmethod
    def from_pretrained(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
        """Load the tokenizer of a model; see `load_tokenizer`."""
        return load_tokenizer(name_or_path)


def _from_gguf(file: Path) -> PreTrainedTokenizerBase:
    from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(open_gguf(file))


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder}: no tokenizer files (looked for {', '.join(_TOKENIZER_FILES)})")
    check_links(folder)
    check_tokenizer_config(folder)
    # transformers only advises that PyTorch is missing, which is intended here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer as TransformersTokenizer

    try:
        tokenizer = TransformersTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # wrong values may fail anywhere in transformers; a panic in Rust is not an Exception
        reason = error if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder}: transformers cannot read the tokenizer: {reason}") from error
    assert tokenizer is not None, "transformers returns a tokenizer or raises"
    return tokenizer
