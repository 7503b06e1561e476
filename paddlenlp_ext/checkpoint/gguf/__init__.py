"""Header of a GGUF file: metadata and tensor locations (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GgufTensor:
    """Stored tensor: name of its quantization type, shape (rows first, as in NumPy), first byte, number of bytes."""

    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """Header of one file; `GgufWeights` reads the tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Value of `general.architecture`: llama, qwen2, ..."""
        return self.require("general.architecture")

    def require(self, key: str) -> Any:
        """Return a metadata value that must exist.

        Raises:
            ValueError: the key is missing.
        """
        if key not in self.metadata:
            raise ValueError(
                f"{self.path}: the GGUF metadata has no {key}, which is required; use another file of the model"
            )
        return self.metadata[key]

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """Return a value stored under the architecture's prefix, such as `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def require_gguf() -> None:
    """Check that the gguf library is installed.

    Raises:
        ModuleNotFoundError: the library is absent; the message says how to install it.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf; run: pip install gguf==0.19.0")


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the header of a file; repeated calls for an unchanged file are cached.

    Raises:
        ValueError: the file is not GGUF, damaged or truncated.
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
    """Read the header of `path`; `size` and `modified` are only cache keys that detect a changed file."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: not a GGUF file, or damaged or truncated ({error}); fetch it again") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path}: a big-endian GGUF file is not supported; use a little-endian one")
    tensors = {
        tensor.name: GgufTensor(
            tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape)), tensor.data_offset, tensor.n_bytes
        )
        for tensor in reader.tensors
    }
    return GgufFile(path, metadata, tensors)
