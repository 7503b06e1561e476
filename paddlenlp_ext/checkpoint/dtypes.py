"""Dtypes of stored tensors, and conversions between dtypes in NumPy.

NumPy lacks bfloat16 and FP8, so functions pass each array together with the name of its dtype. A `uint16` array holds
the bits of bfloat16 values, as in Paddle (`Tensor.numpy()`, `Tensor.set_value`). A `uint8` array holds the bits of FP8
values (Open Compute Project: OCP 8-bit Floating Point, and Microscaling Formats 1.0). FP8 values can be read but not
written.
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
    "float8_e8m0fnu": np.dtype("u1"),  # the bits, which encode a power of 2
}
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"})
_CHUNK = 1 << 18


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even.

    Args:
        values: float32 array of any shape.

    Returns:
        The bits, uint16, in the shape of `values`. NaN stays NaN; values beyond the largest bfloat16 become infinite.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
    rounded = np.empty(bits.size, dtype="<u2")
    for start in range(0, bits.size, _CHUNK):  # chunks fit the CPU cache and avoid temporary copies of the tensor
        chunk = bits[start : start + _CHUNK]
        nearest = chunk + (np.uint32(0x7FFF) + ((chunk >> np.uint32(16)) & np.uint32(1)))
        is_nan = (chunk & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        nearest[is_nan] = chunk[is_nan] | np.uint32(0x400000)  # rounding could turn a NaN into infinity
        rounded[start : start + _CHUNK] = nearest >> np.uint32(16)
    return rounded.reshape(np.shape(values))


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(bits.shape)


def _float8_e4m3fn() -> np.ndarray:
    """Return the values of all 256 E4M3 codes: a sign bit, 4 exponent bits and 3 mantissa bits, without infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


def _float8_e8m0fnu() -> np.ndarray:
    """Return the values of all 256 E8M0 codes: 2^(code - 127), and NaN for code 255."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)


_FLOAT8 = {"float8_e4m3fn": _float8_e4m3fn(), "float8_e8m0fnu": _float8_e8m0fnu()}


def cast(values: np.ndarray, stored: str, target: str) -> np.ndarray:
    """Convert an array from the dtype `stored` to the dtype `target`; return `values` itself if the dtypes are equal.

    Raises:
        ValueError: only one of `stored` and `target` is a floating-point dtype.
    """
    if stored == target:
        return values
    if (stored in FLOATING) != (target in FLOATING):
        raise ValueError(
            f"a tensor of dtype {stored} cannot be read as {target}; integers and floats are not interchangeable"
        )
    assert target not in _FLOAT8, "FP8 is not written"
    if stored in _FLOAT8:
        values = _FLOAT8[stored][values]
    if stored == "bfloat16":
        values = bfloat16_to_float32(values)
    if target == "bfloat16":
        return float32_to_bfloat16(values.astype(np.float32, copy=False))
    return values.astype(NUMPY_DTYPE[target], copy=False)
