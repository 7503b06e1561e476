"""QuantizedWeight structs for calls of the C++ library."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels


def packed(weight: QuantizedWeight, index: int = 0) -> object:
    """Return a pointer to the QuantizedWeight struct of matrix `index` of a stack, as an argument of a C++ call."""
    return ctypes.byref(packed_struct(weight, index))


def packed_struct(weight: QuantizedWeight, index: int = 0) -> ctypes.Structure:
    """Return the QuantizedWeight struct of matrix `index` of a stack; the struct does not keep the tensors alive."""
    out, width = weight.shape
    table = None if weight.algo == "weight_only_int8" else _address(weight.algo)
    nested = (None, None, None)
    if weight.group_scales is not None:
        assert weight.offset is not None
        nested = (_address(""), _own(weight.group_scales, index), _own(weight.offset, index))
    sizes = out, width, weight.block_size, weight.group_size
    codes, scales = _own(weight.codes, index), _own(weight.scales, index)
    return struct("QuantizedWeight")(*sizes, codes, table, scales, *nested)


def _own(stacked: paddle.Tensor, index: int) -> int:
    """Return the address of matrix `index` in a stacked tensor."""
    return library.pointer(stacked) + index * stacked.shape[-1] * stacked.element_size()


@functools.cache
def _address(algo: str) -> int:
    """Return the address of the codebook of a 4-bit format, or of quantized scales (""); codebooks are never freed."""
    table = levels(algo) if algo else dynamic_levels()
    assert table.flags.c_contiguous and table.dtype == np.float32
    return table.ctypes.data
