"""Number formats of stored tensors, in NumPy only.

NumPy has no bfloat16. A bfloat16 tensor is passed as its bits in a `uint16` array, which is also how Paddle exports and
imports one (`Tensor.numpy()`, `Tensor.set_value`). The name of the format is therefore always passed with the array.
FP8 is passed as its bits in a `uint8` array; it is read, never written (Open Compute Project, OCP 8-bit Floating Point
and Microscaling Formats 1.0).
"""

from __future__ import annotations

import numpy as np

NUMPY_DTYPE: dict[str, np.dtype] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the bits
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint64": np.dtype("<u8"),
    "uint32": np.dtype("<u4"),
    "uint16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
    "float8_e4m3fn": np.dtype("u1"),  # the bits
    "float8_e8m0fnu": np.dtype("u1"),  # the bits: a power of 2
}
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"})
_CHUNK = 1 << 18


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even.

    Args:
        values: float32 array of any shape.

    Returns:
        The bits, uint16, same shape. NaN stays NaN; values beyond the largest bfloat16 become infinite, as in hardware.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
    rounded = np.empty(bits.size, dtype="<u2")
    for start in range(0, bits.size, _CHUNK):  # in chunks that fit the cache: no tensor-sized temporaries
        piece = bits[start : start + _CHUNK]
        nearest = piece + (np.uint32(0x7FFF) + ((piece >> np.uint32(16)) & np.uint32(1)))
        is_nan = (piece & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        nearest[is_nan] = piece[is_nan] | np.uint32(0x400000)  # rounding could turn a NaN into infinity
        rounded[start : start + _CHUNK] = nearest >> np.uint32(16)
    return rounded.reshape(np.shape(values))


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 bits (uint16) to float32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(bits.shape)


def _float8_e4m3fn() -> np.ndarray:
    """Return the values of all codes: a sign, 4 bits of exponent and 3 of mantissa, without infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


def _float8_e8m0fnu() -> np.ndarray:
    """Return the values of all codes: 2^(code - 127), the last one not a number."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)


_FLOAT8 = {"float8_e4m3fn": _float8_e4m3fn(), "float8_e8m0fnu": _float8_e8m0fnu()}


def cast(values: np.ndarray, stored: str, target: str) -> np.ndarray:
    """Convert an array from the format named `stored` to the format `target`; no copy if the two are equal.

    Raises:
        ValueError: one of the two is a floating format and the other is not.
    """
    if stored == target:
        return values
    if (stored in FLOATING) != (target in FLOATING):
        raise ValueError(f"a {stored} tensor cannot be read as {target}; only floating formats convert into each other")
    assert target not in _FLOAT8, "FP8 is not written"
    if stored in _FLOAT8:
        values = _FLOAT8[stored][values]
    if stored == "bfloat16":
        values = bfloat16_to_float32(values)
    if target == "bfloat16":
        return float32_to_bfloat16(values.astype(np.float32, copy=False))
    return values.astype(NUMPY_DTYPE[target], copy=False)
