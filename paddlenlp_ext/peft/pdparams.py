"""Arrays in a `.pdparams` file, read by an unpickler that knows arrays and nothing else.

A pickle is a program: it names functions and calls them. `paddle.save` of tensors names only what makes NumPy arrays,
tuples and text; a file that names anything else is refused before that is looked up.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32


class _Latin1Bytes:
    """Bytes as Python 3 writes them into a pickle of Python 2's form, without attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it asks for text as {encoding!r}, which no array needs")
        return text.encode("latin1")


# By the spellings of Python 2 and 3, and of NumPy before and since 2.0.
_KNOWN = {
    ("__builtin__", "tuple"): tuple,
    ("builtins", "tuple"): tuple,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("_codecs", "encode"): _Latin1Bytes(),
}
_NUMPY_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray"}


def read_pickled_arrays(path: Path) -> dict[str, np.ndarray]:
    """Name -> array of a file that `paddle.save` wrote of a dict of tensors; floating ones as float32.

    Raises:
        ValueError: the file is damaged, or holds anything but arrays under names; nothing of it has run then.
    """
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not read as arrays ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not tensors by name")
    # Paddle notes its own names of tensors beside them.
    return {name: _array(path, name, value) for name, value in content.items() if not str(name).endswith("@@")}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in _NUMPY_MODULES and name == "_reconstruct":
            return super().find_class("numpy._core.multiarray", name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def _array(path: Path, name: Any, value: Any) -> np.ndarray:
    """A tensor is an array, or a pair of Paddle's name for it and an array; bfloat16 lies as uint16."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if not isinstance(name, str) or not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise ValueError(f"{path}: {name!r} is no tensor of numbers")
    if value.dtype == np.uint16:
        return bfloat16_to_float32(value)
    return value.astype(np.float32) if value.dtype.kind == "f" else value
