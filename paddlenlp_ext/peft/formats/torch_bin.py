"""Read the tensors of a `.bin` file that `torch.save` wrote, with an unpickler that is restricted to tensors.

The file is a ZIP archive. `data.pkl` is a pickle of the dict of tensors, and `data/<key>` is the content of a storage.
Unpickling imports and calls the functions that the pickle refers to. For tensors, the pickle refers only to functions
that build tensors from storages. A file that refers to any other function is rejected before the import. PyTorch is not
needed.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32
from paddlenlp_ext.peft.formats.pdparams import check_opcodes


class _StorageType(NamedTuple):
    """Element type of a storage; bfloat16 is read as uint16."""

    dtype: str
    is_bfloat16: bool = False


_STORAGES = {
    "FloatStorage": _StorageType("<f4"),
    "DoubleStorage": _StorageType("<f8"),
    "HalfStorage": _StorageType("<f2"),
    "BFloat16Storage": _StorageType("<u2", is_bfloat16=True),
    "LongStorage": _StorageType("<i8"),
    "IntStorage": _StorageType("<i4"),
    "ShortStorage": _StorageType("<i2"),
    "CharStorage": _StorageType("i1"),
    "ByteStorage": _StorageType("u1"),
    "BoolStorage": _StorageType("?"),
}


class _RebuildTensor:
    """Replacement for `torch._utils._rebuild_tensor_v2`, without attributes that a pickle could set."""

    __slots__ = ()

    def __call__(
        self, storage: np.ndarray, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
    ) -> np.ndarray:
        numbers = (offset, *size, *stride)
        if not isinstance(storage, np.ndarray) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise pickle.UnpicklingError("a tensor has no storage, or a negative or non-integer size or stride")
        if len(size) != len(stride):
            raise pickle.UnpicklingError(f"a tensor has {len(size)} sizes and {len(stride)} strides")
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if math.prod(size) and last >= storage.size:
            raise pickle.UnpicklingError(
                f"a tensor of shape {list(size)} exceeds its storage of {storage.size} elements"
            )
        if not math.prod(size):
            return np.zeros(size, storage.dtype)
        steps = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


class _RebuildParameter:
    """Replacement for `torch._utils._rebuild_parameter`; returns the parameter's tensor."""

    __slots__ = ()

    def __call__(self, data: np.ndarray, *_: Any) -> np.ndarray:
        return data


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    **{("torch", name): storage for name, storage in _STORAGES.items()},
}


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that builds NumPy arrays from the storages of an archive."""

    def __init__(self, archive: zipfile.ZipFile, data: zipfile.ZipInfo) -> None:
        content = _read(archive, data)
        check_opcodes(content)
        super().__init__(io.BytesIO(content))
        self._archive, self._folder = archive, data.filename.removesuffix("data.pkl")
        self._read_storages: dict[tuple[str, _StorageType], np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"refusing to unpickle {module}.{name}: only tensors are allowed")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, length = pid
        if kind != "storage" or not isinstance(storage, _StorageType) or not str(key).isdigit():
            raise pickle.UnpicklingError(f"{kind!r} is not the storage of a tensor")
        entry = self._archive.getinfo(f"{self._folder}data/{key}")
        expected = int(length) * np.dtype(storage.dtype).itemsize
        if entry.file_size != expected:
            raise pickle.UnpicklingError(f"storage {key} has {entry.file_size} bytes, expected {expected}")
        known = self._read_storages  # read each storage once; a pickle may refer to it several times
        if (key, storage) not in known:
            values = np.frombuffer(_read(self._archive, entry), storage.dtype)
            known[key, storage] = bfloat16_to_float32(values) if storage.is_bfloat16 else values
        return known[key, storage]


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return the contents of an entry, which `torch.save` never compresses.

    Raises:
        UnpicklingError: the entry is compressed, and could therefore expand to far more than the file's size.
    """
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise pickle.UnpicklingError(f"{entry.filename} is compressed")
    return archive.read(entry)


def read_torch_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read a dict of tensors that `torch.save` wrote, as a dict of arrays; floating-point arrays become float32.

    Raises:
        ValueError: the file is damaged, was written before PyTorch 1.6, has big-endian tensors, or contains objects
            other than named tensors; code in the file has not run.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a ZIP archive, the format of PyTorch 1.6 and later; {_REMEDY}")
    try:
        with zipfile.ZipFile(path) as archive:
            data = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
            order = data.filename.removesuffix("data.pkl") + "byteorder"
            if order in archive.namelist() and _read(archive, archive.getinfo(order)) != b"little":
                raise ValueError("its tensors are big-endian")
            content = _TensorUnpickler(archive, data).load()
    except (
        *(pickle.UnpicklingError, zipfile.BadZipFile, EOFError, AttributeError, LookupError),
        *(OverflowError, StopIteration, TypeError, ValueError),
    ) as error:
        raise ValueError(f"{path}: cannot be read as tensors ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: contains a {type(content).__name__}, not a dict of tensors; {_REMEDY}")
    wrong = [name for name, value in content.items() if not isinstance(name, str) or not isinstance(value, np.ndarray)]
    if wrong:
        raise ValueError(f"{path}: {wrong[0]!r} is not a tensor; {_REMEDY}")
    num_bytes, limit = sum(value.nbytes for value in content.values()), _MAX_EXPANSION * path.stat().st_size
    if num_bytes > limit:  # tensors that share storages or repeat elements can be larger than the file
        raise ValueError(f"{path}: its tensors expand to {num_bytes:,} bytes; the maximum is {limit:,}; {_REMEDY}")
    return {
        name: np.array(value, np.float32 if value.dtype.kind == "f" else value.dtype) for name, value in content.items()
    }


_REMEDY = "save the adapter as safetensors"
_MAX_EXPANSION = 16
"""Maximum ratio of the size of all tensors to the size of the file."""
