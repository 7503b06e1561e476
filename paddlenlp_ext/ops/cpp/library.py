"""C++ library of CPU kernels, from the wheel or built from `csrc/` on first use, and called through ctypes.

`csrc/api*.h` declare the entry points. The shared library uses the oneDNN and OpenMP libraries that Paddle has
loaded. PADDLENLP_EXT_NATIVE=0 disables the library.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import paddle

from paddlenlp_ext.ops.cpp.api_header import parameter_types
from paddlenlp_ext.ops.cpp.build import BuildError, build, find_prebuilt
from paddlenlp_ext.ops.cpp.levels import LINKED
from paddlenlp_ext.ops.dispatch import on_cpu_in_fp32
from paddlenlp_ext.paddle_compat import empty_unchecked
from paddlenlp_ext.utils.logging import get_logger

_ERRORS = {1: RuntimeError, 2: MemoryError, 3: ValueError}  # exception for each Status of csrc/api_types.h
_DLPACK = {"float32": (2, 32), "bfloat16": (4, 16), "int64": (0, 64), "int32": (0, 32), "int8": (0, 8), "uint8": (1, 8)}
_CPU = paddle.CPUPlace()
_LIBRARIES = Path(paddle.__file__).parent / "libs"
_POOLED_BYTES = 1 << 18  # for smaller tensors, Paddle's allocator is fast enough

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def library() -> ctypes.CDLL | None:
    """Return the loaded library, or None if it is unavailable (see `unavailable_reason`); build it if necessary."""
    return _load()[0]


def unavailable_reason() -> str | None:
    """Return the reason why the library is unavailable on this machine, or None if it is available."""
    return _load()[1]


def usable(x: paddle.Tensor) -> str | None:
    """Return None for float32 on the CPU if the library is available, otherwise why C++ backends cannot run."""
    return on_cpu_in_fp32(x) or unavailable_reason()


def usable_in_fp32_or_bf16(x: paddle.Tensor) -> str | None:
    """Return None for float32 or bfloat16 on the CPU if the library is available, otherwise why C++ cannot run."""
    return unavailable_reason() if x.place.is_cpu_place() and x.dtype == paddle.bfloat16 else usable(x)


def products_unavailable_reason() -> str | None:
    """Return the reason why C++ matrix products are unavailable, such as a Paddle without oneDNN; else None."""
    if _has_onednn(_LIBRARIES):
        return unavailable_reason()
    return unavailable_reason() or "this build of Paddle lacks oneDNN, which computes the matrix products of C++ ops"


@functools.cache
def _has_onednn(libraries: Path) -> bool:
    return (libraries / "libdnnl.so.3").exists()


def with_products(condition: Callable[[paddle.Tensor], str | None]) -> Callable[[paddle.Tensor], str | None]:
    """Return a condition for a C++ op that multiplies matrices: `condition`, then `products_unavailable_reason`."""
    return lambda x: condition(x) or products_unavailable_reason()


@functools.cache
def function(name: str) -> Callable[..., None]:
    """Return the entry point `name` of `csrc/api*.h`.

    Pointer arguments are addresses, ctypes objects or None. A failed call raises RuntimeError, MemoryError or
    ValueError, depending on the returned status. The message starts with the name of the entry point.
    """
    found = library()
    assert found is not None, unavailable_reason()
    exported, types = getattr(found, name), parameter_types()[name]
    last_error = found.last_error
    last_error.restype = ctypes.c_char_p

    def check(status: int, _: object, arguments: tuple[object, ...]) -> None:
        if status != 0:
            raise _ERRORS[status](f"{name}: {last_error().decode()}")
        if len(arguments) != len(types):  # ctypes rejects too few arguments but not too many
            raise TypeError(f"{name} takes {len(types)} arguments, not {len(arguments)}")

    exported.argtypes, exported.errcheck = types, check
    return exported


def pointer(tensor: paddle.Tensor) -> int:
    """Return the address of the first value of a contiguous tensor.

    The address does not keep the tensor alive. The caller must keep a reference until the C++ call has returned.
    """
    assert tensor.is_contiguous(), "C++ ops require contiguous tensors"
    return tensor.data_ptr()


def pointers(tensors: Sequence[paddle.Tensor]) -> ctypes.Array:
    """Return the addresses of the tensors as a C array."""
    return (ctypes.c_void_p * len(tensors))(*map(pointer, tensors))


def sizes(tensors: Sequence[paddle.Tensor]) -> ctypes.Array:
    """Return the number of values of each tensor as a C array of int64."""
    return (ctypes.c_int64 * len(tensors))(*(math.prod(tensor.shape) for tensor in tensors))


def empty(shape: list[int], dtype: str = "float32") -> paddle.Tensor:
    """Return an uninitialized tensor for a C++ op to fill; large tensors use pooled memory."""
    code, bits = _DLPACK[dtype]
    size = bits // 8
    for length in shape:
        size *= length
    if size < _POOLED_BYTES:
        # The argument checks of paddle.empty take 3 us, and a decoding step creates hundreds of small tensors.
        return empty_unchecked(shape, getattr(paddle, dtype), _CPU)
    address = ctypes.c_void_p()
    try:
        function("buffers_new")(code, bits, len(shape), (ctypes.c_int64 * len(shape))(*shape), ctypes.byref(address))
    except MemoryError as error:
        raise MemoryError(f"cannot allocate a tensor of shape {shape} in {dtype}") from error
    return paddle.utils.dlpack.from_dlpack(_capsule(address, b"dltensor", None))


@functools.cache
def small_batch_rows(in_bf16: bool) -> int:
    """Return the largest number of rows for which the small-batch matmuls are at least as fast as oneDNN's.

    The result is 0 if the library is unavailable.

    Args:
        in_bf16: whether oneDNN's matmul would round its inputs to bfloat16.
    """
    if library() is None:
        return 0
    rows = ctypes.c_int64()
    function("small_batch_rows")(in_bf16, ctypes.byref(rows))
    return rows.value


def threads() -> int:
    """Return the number of threads of C++ ops."""
    count = ctypes.c_int64()
    function("get_threads")(ctypes.byref(count))
    return count.value


def set_threads(count: int) -> None:
    """Set the number of threads of C++ ops; by default, C++ ops use as many threads as Paddle's matmuls."""
    function("set_threads")(count)


def loaded_path() -> Path | None:
    """Return the path of the loaded library, or None if the library is unavailable."""
    found = library()
    return None if found is None else Path(found._name)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("PADDLENLP_EXT_NATIVE") == "0":
        return None, "the C++ library is disabled by PADDLENLP_EXT_NATIVE=0"
    try:
        found = _load_prebuilt() or ctypes.CDLL(str(build(_LIBRARIES)))
    except (BuildError, OSError) as error:
        get_logger(__name__).warning("the C++ library is unavailable, so CPU ops run slower in plain Paddle: %s", error)
        return None, str(error).splitlines()[0]
    get_logger(__name__).debug("loaded the C++ library %s", found._name)
    mkl = _LIBRARIES / "libmklml_intel.so"
    if mkl.exists():  # otherwise, OMP_NUM_THREADS or the number of cores applies
        found.set_threads(ctypes.c_int64(ctypes.CDLL(str(mkl)).MKL_Get_Max_Threads()))
    return found, None


def _load_prebuilt() -> ctypes.CDLL | None:
    """Return the library of the wheel, or None if the wheel has none for this machine."""
    prebuilt = find_prebuilt()
    if prebuilt is None:
        return None
    try:
        for name in LINKED:  # the library names these files without a path; the loader uses the copies loaded here
            ctypes.CDLL(str(_LIBRARIES / name))
        return ctypes.CDLL(str(prebuilt))
    except OSError as error:
        get_logger(__name__).info("the C++ library of the wheel cannot be loaded; building it here: %s", error)
        return None
