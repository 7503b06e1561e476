"""Read the arrays of a `.pdparams` file with an unpickler that is restricted to arrays.

Unpickling imports and calls the functions that a file refers to. For tensors, `paddle.save` writes a file that refers
only to functions for NumPy arrays, tuples and strings. A file that refers to any other function is rejected before the
import.
"""

from __future__ import annotations

import mmap
import pickle
import pickletools
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32


class _Latin1Bytes:
    """Replacement for `_codecs.encode`, which pickle protocol 2 calls to build bytes."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"refusing to decode text as {encoding!r}: only arrays are allowed")
        return text.encode("latin1")


class _ArrayType:
    """Replacement for `numpy.ndarray`, which a file could call with any size; only `_EmptyArray` accepts this class."""

    __slots__ = ()


class _EmptyArray:
    """Replacement for NumPy's `_reconstruct`: returns an empty array, which the pickle then fills."""

    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, _dtype: Any) -> np.ndarray:
        if not isinstance(kind, _ArrayType) or shape != (0,):
            raise pickle.UnpicklingError(f"refusing to create an array of shape {shape}: only empty arrays are allowed")
        return np.empty(0, np.int8)


# `__builtin__` is the name of `builtins` in Python 2. `_NUMPY_MODULES` has the module names of NumPy 1 and 2.
_KNOWN = {
    ("__builtin__", "tuple"): tuple,
    ("builtins", "tuple"): tuple,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): _ArrayType(),
    ("_codecs", "encode"): _Latin1Bytes(),
}
_NUMPY_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray"}


def read_pickled_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a dict of tensors that `paddle.save` wrote, as a dict of arrays; floating-point arrays become float32.

    Raises:
        ValueError: the file is damaged or contains objects other than named arrays; code in the file has not run.
    """
    try:
        with path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                check_opcodes(data)
            content = _ArrayUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as arrays ({error}); save the tensors as safetensors") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: contains a {type(content).__name__}, not a dict of tensors; save the tensors as safetensors"
        )
    # Paddle adds an entry "StructuredToParameterName@@" with its internal tensor names.
    return {name: _array(path, name, value) for name, value in content.items() if not str(name).endswith("@@")}


def check_opcodes(content: bytes | mmap.mmap) -> None:
    """Check that no length or memo index exceeds the size of the pickle, because unpickling allocates that memory.

    Raises:
        ValueError: the pickle is damaged.
    """
    for opcode, argument, _ in pickletools.genops(cast(IO[bytes], content)):
        if opcode.name in ("PUT", "LONG_BINPUT", "FRAME") and (argument or 0) > len(content):
            raise ValueError(f"{opcode.name} has the argument {argument:,} in a file of {len(content):,} bytes")


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in _NUMPY_MODULES and name == "_reconstruct":
            return _EmptyArray()
        raise pickle.UnpicklingError(f"refusing to unpickle {module}.{name}: only arrays are allowed")


def _array(path: Path, name: Any, value: Any) -> np.ndarray:
    """Return the array in `value`, which is an array (bfloat16 as uint16) or a tuple of tensor name and array."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if not isinstance(name, str) or not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise ValueError(f"{path}: {name!r} is not a numeric tensor; save the tensors as safetensors")
    if value.dtype == np.uint16:
        return bfloat16_to_float32(value)
    return value.astype(np.float32) if value.dtype.kind == "f" else value
