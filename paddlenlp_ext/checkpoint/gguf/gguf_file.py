"""Open a GGUF model and access its metadata with type checks.

The tensors of a split model are distributed over the files `NAME-00001-of-0000N.gguf` to `NAME-0000N-of-0000N.gguf`.
The first file contains the metadata. One `GgufFile` represents all files of the model.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from paddlenlp_ext.checkpoint.gguf.read_header import GgufTensor, read_header

T = TypeVar("T")
_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_ACCEPTED: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
_LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensor locations of a GGUF model; `GgufWeights` reads the tensor values.

    Attributes:
        path: the file, or the first file of a split model.
        metadata: key -> value.
        tensors: tensor name -> location, for the tensors of all files.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Value of `general.architecture`, such as llama or qwen2."""
        return self.require("general.architecture", str)

    def require(self, key: str, kind: type[T]) -> T:
        """Return a required metadata value.

        Raises:
            ValueError: the key is missing, or the value does not have the type `kind`.
        """
        self._require_key(key)
        return self._checked(key, self.metadata[key], kind)

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Return a metadata value, or `default` if the key is missing.

        Raises:
            ValueError: the value does not have the type `kind`.
        """
        return self._checked(key, self.metadata[key], kind) if key in self.metadata else default

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """Return a required metadata list.

        Raises:
            ValueError: the key is missing, or the value is not a list of `kind`.
        """
        self._require_key(key)
        values = self.metadata[key]
        if not isinstance(values, list):
            raise ValueError(f"{self.path}: {key} is {_shown(values)}, not a list; the file is damaged")
        for index, value in enumerate(values):
            if type(value) not in _ACCEPTED[kind]:  # avoids a function call for each token
                self._checked(f"{key}[{index}]", value, kind)
        return values

    def architecture_key(self, key: str) -> str:
        """Return `key` with the prefix of the architecture, such as `llama.block_count`."""
        return f"{self.architecture}.{key}"

    def _require_key(self, key: str) -> None:
        if key not in self.metadata:
            raise ValueError(
                f"{self.path}: the GGUF metadata has no {key}, which is required; use a different GGUF file of this "
                "model"
            )

    def _checked(self, key: str, value: Any, kind: type[T]) -> T:
        if type(value) not in _ACCEPTED[kind]:
            raise ValueError(f"{self.path}: {key} is {_shown(value)}, not {_KINDS[kind]}; the file is damaged")
        if kind is float and not abs(value) <= _LARGEST_FLOAT32:  # also true for NaN
            raise ValueError(f"{self.path}: {key} is {value}, not a finite float32; the file is damaged")
        return value


def _shown(value: Any) -> str:
    return f"a list of {len(value)} items" if isinstance(value, list) else repr(value)[:60]


def require_gguf() -> None:
    """Check that the gguf library is installed.

    Raises:
        ModuleNotFoundError: the library is absent; the message says how to install it.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf; run: pip install gguf==0.19.0")


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the headers of all files of a model; cache the last two models until their files change.

    Args:
        path: the file, or any file of a split model.

    Raises:
        ValueError: a file is missing, damaged, truncated or not GGUF, or the files are from different models.
        ModuleNotFoundError: the gguf library is not installed.
    """
    require_gguf()
    paths = part_paths(Path(path))
    missing = [part for part in paths if not part.is_file()]
    if missing:
        parts = f"; the model has {len(paths)} files, which must all be in this folder" if len(paths) > 1 else ""
        raise ValueError(f"{missing[0]}: no such file{parts}")
    status = [part.stat() for part in paths]
    return _read_model(tuple((part, s.st_size, s.st_mtime_ns) for part, s in zip(paths, status, strict=True)))


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all files of the split model that includes `path`; `[path]` if the model is not split."""
    match = _PART_NAME.fullmatch(path.name)
    count = int(match[3]) if match else 1
    if match is None or count == 1 or not 1 <= int(match[2]) <= count:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]


@functools.lru_cache(maxsize=2)
def _read_model(parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    """Read the headers of all files of a model.

    Args:
        parts: path, size and modification time of each file; size and time are used only as cache keys.
    """
    headers = [GgufFile(path, *read_header(path)) for path, _, _ in parts]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers, start=1):
        _check_part(header, number, len(parts))
        twice = next((name for name in header.tensors if name in tensors), None)
        if twice is not None:
            raise ValueError(
                f"{header.path}: tensor {twice} is also in an earlier file; download all files of the model again"
            )
        tensors |= header.tensors
    first = headers[0]
    expected = first.get("split.tensors.count", int, len(tensors))
    if expected != len(tensors):
        raise ValueError(
            f"{first.path}: split.tensors.count is {expected}, but the files have {len(tensors)} tensors; download all "
            "files of the model again"
        )
    return GgufFile(first.path, first.metadata, tensors)


def _check_part(header: GgufFile, number: int, count: int) -> None:
    """Check that the metadata agrees with the file name.

    Args:
        header: header of the file.
        number: index of the file in the split model according to its name, from 1.
        count: number of files according to the name.

    Raises:
        ValueError: the metadata has a different index or a different number of files.
    """
    stored_count = max(header.get("split.count", int, 1), 1)  # llama.cpp stores 0 in a merged file
    stored_number = header.get("split.no", int, 0) + 1
    if (stored_number, stored_count) == (number, count):
        return
    name = f"NAME-{stored_number:05}-of-{stored_count:05}.gguf" if stored_count > 1 else "NAME.gguf"
    raise ValueError(
        f"{header.path}: this is file {stored_number} of {stored_count} according to the metadata, but file {number} "
        f"of {count} according to its name; rename the file to {name}"
    )
