"""Load a tokenizer from a Hugging Face folder or a GGUF file with `transformers`, without PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.tokenizer_checks import check_tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        name_or_path: any name that `resolve_model` accepts; the weights of a hub model are not downloaded.

    Returns:
        A transformers tokenizer, with the chat template of the model if there is one. A tokenizer without a padding
        token pads with the end-of-text token. End-of-text tokens in the data remain targets, because labels, not token
        ids, select the target tokens.

    Raises:
        ValueError: the model does not exist, has no tokenizer files, or transformers cannot read them.
    """
    path = resolve_model(name_or_path, weights=False)
    tokenizer = _from_gguf(path) if path.is_file() else _from_folder(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class AutoTokenizer:
    """Tokenizer loader with the interface of transformers and PaddleNLP."""

    @staticmethod
    def from_pretrained(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
        """Load a tokenizer with `load_tokenizer`.

        The tokenizer can also return Paddle tensors (`return_tensors="pd"`) and decode them.
        """
        return _with_paddle_tensors(load_tokenizer(name_or_path))


class _PaddleTensors:
    """Mixin for transformers' tokenizers: `__call__` can return Paddle tensors, and `decode` accepts them."""

    def __call__(self, *args: Any, return_tensors: str | None = None, **options: Any) -> Any:
        """Tokenize as in transformers; with `return_tensors="pd"`, the values are Paddle tensors."""
        parent: Any = super()
        if return_tensors != "pd":
            return parent.__call__(*args, return_tensors=return_tensors, **options)
        import paddle

        encoded = parent.__call__(*args, return_tensors="np", **options)
        encoded.data.update({name: paddle.to_tensor(array) for name, array in encoded.items()})
        return encoded

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        """Decode as in transformers; `token_ids` may be a Paddle tensor, or a list of Paddle tensors."""
        parent: Any = super()
        return parent.decode(_without_tensors(token_ids), *args, **options)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Copy and pickle the tokenizer as its transformers class, because the subclass has no importable name."""
        plain = object.__new__(type(self).__mro__[2])
        plain.__dict__.update(self.__dict__)
        return _with_paddle_tensors, (plain,)


def _with_paddle_tensors(tokenizer: Any) -> PreTrainedTokenizerBase:
    """Add `_PaddleTensors` to the class of a tokenizer; keep the name of the class, which transformers saves."""
    cls = type(tokenizer)
    tokenizer.__class__ = type(cls.__name__, (_PaddleTensors, cls), {"__module__": cls.__module__})
    return tokenizer


def _without_tensors(token_ids: Any) -> Any:
    """Replace Paddle tensors with NumPy arrays."""
    if isinstance(token_ids, list | tuple):
        return [_without_tensors(each) for each in token_ids]
    paddle = sys.modules.get("paddle")
    return token_ids.numpy() if paddle is not None and isinstance(token_ids, paddle.Tensor) else token_ids


def _from_gguf(file: Path) -> PreTrainedTokenizerBase:
    from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(open_gguf(file))


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    check_tokenizer_files(folder)
    found = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if found in ([], ["tokenizer_config.json"]) and any(folder.glob("*.tiktoken")):
        from paddlenlp_ext.checkpoint.tiktoken_file import tokenizer_from_tiktoken

        return tokenizer_from_tiktoken(folder)
    if not found:
        raise ValueError(
            f"{folder}: no tokenizer files (looked for {', '.join(_TOKENIZER_FILES)}); copy the files from the "
            "original model"
        )
    # Hide transformers' warning that PyTorch is not installed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer as TransformersTokenizer

    try:
        tokenizer = TransformersTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    # Invalid files may raise any exception in transformers; a panic in Rust code is not a subclass of Exception.
    except BaseException as error:
        reason = error if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder}: transformers cannot read the tokenizer: {reason}") from error
    assert tokenizer is not None, "transformers must return a tokenizer or raise an error"
    return tokenizer
