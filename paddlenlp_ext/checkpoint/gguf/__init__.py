"""A GGUF file's metadata and where its tensors lie (format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor: its quantization type's name, shape (rows first, as in NumPy), first byte, number of bytes."""

    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of one file; tensors are read by `GgufWeights`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """`general.architecture`: llama, qwen2, ..."""
        return self.require("general.architecture")

    def require(self, key: str) -> Any:
        """A metadata value that must be there.

        Raises:
            ValueError: it is not.
        """
        if key not in self.metadata:
            raise ValueError(f"{self.path}: the GGUF metadata has no {key}, without which the file can't be used")
        return self.metadata[key]

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """A value kept under the architecture's own prefix, such as `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def require_gguf() -> None:
    """Raise a `ModuleNotFoundError` that says what to install, where the gguf library is absent."""
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf: pip install gguf==0.19.0")


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read a file's header; a second call for the same unchanged file costs nothing.

    Raises:
        ValueError: not GGUF, damaged or cut short.
        ModuleNotFoundError: the gguf library is not installed.
    """
    require_gguf()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    status = path.stat()
    return _read_header(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read_header(path: Path, size: int, modified: int) -> GgufFile:
    """The header of `path`; `size` and `modified` only tell a changed file from the one that was read."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: not a GGUF file, or damaged or cut short ({error}); fetch it again") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path}: a big-endian GGUF file; only little-endian ones are read")
    tensors = {
        tensor.name: GgufTensor(
            tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape)), tensor.data_offset, tensor.n_bytes
        )
        for tensor in reader.tensors
    }
    return GgufFile(path, metadata, tensors)
