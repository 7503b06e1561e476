"""Structs of linear layers in the decoding step of several layers (`DecodeMatrix` in csrc/api_decoding.h).

Shapes: E matrices of a stack, P fused projections.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.quantized_weight import QuantizedStack
from paddlenlp_ext.ops.quantized_weight.cpp import packed_struct
from paddlenlp_ext.ops.tensor_utils import contiguous
from paddlenlp_ext.ops.training_blocks import AdaptedLinear


class Matrices:
    """Consecutive `DecodeMatrix` structs of matrices with the same sizes, which keep the memory of their fields alive.

    Args:
        weights: for each matrix, the address of a dense weight [out, in], or the struct of a quantized weight.
        shape: (out, in).
        dtype: dtype of the weights before quantization.
        linear: linear layer of the bias and of the update; None without both.
        scales: factors [out] of the outputs, float32, or None.

    Attributes:
        address: address of the first struct.
        rank: rank of the update; 0 without an update.
    """

    def __init__(
        self,
        weights: Sequence[int | ctypes.Structure],
        shape: tuple[int, int],
        dtype: paddle.dtype,
        linear: AdaptedLinear | None = None,
        scales: paddle.Tensor | None = None,
    ) -> None:
        bias, update = (None, None) if linear is None else (linear.bias, _update(linear))
        self.rank = 0 if update is None else update[0].shape[0]
        tensors = (bias, *(update or (None, None)), scales)
        self._kept = weights, tensors
        (out_features, in_features), is_bf16 = shape, dtype == paddle.bfloat16
        vectors = [None if each is None else library.pointer(each) for each in tensors]
        options = (*vectors, in_features, out_features, self.rank, library.small_batch_rows(is_bf16), is_bf16)
        matrix = struct("DecodeMatrix")
        pairs = [(each, None) if isinstance(each, int) else (None, ctypes.addressof(each)) for each in weights]
        self._structs = (matrix * len(weights))(*(matrix(*pair, *options) for pair in pairs))
        self.address = ctypes.addressof(self._structs)


def single_matrix(linear: AdaptedLinear, scales: paddle.Tensor | None = None) -> Matrices:
    """Return the struct of a linear layer.

    Args:
        linear: linear layer, whose weight and bias must outlive the struct.
        scales: factors [out] of the outputs, float32, or None.
    """
    weight = linear.weight
    address = library.pointer(weight) if isinstance(weight, paddle.Tensor) else packed_struct(weight)
    out_features, in_features = weight.shape
    return Matrices([address], (out_features, in_features), weight.dtype, linear, scales)


def _update(linear: AdaptedLinear) -> tuple[paddle.Tensor, paddle.Tensor] | None:
    """Return copies of A [r, in] and s B^T [r, out] of an update, in float32; None without an update."""
    if linear.a is None or linear.b is None:
        return None
    a, b = linear.a.astype("float32"), linear.b.astype("float32")
    return contiguous(a), contiguous(b.T * linear.scaling)


def stacked_matrices(layer: Any) -> list[Matrices]:
    """Return the structs of a grouped linear layer, E structs for each of its P fused projections.

    Args:
        layer: `GroupedLinear` or `QuantizedGroupedLinear`, which must outlive the structs.
    """
    (groups, outputs, inputs), parts = layer.weight_shape, layer.parts
    shape = outputs // parts, inputs
    stored = getattr(layer, "stored", None)
    if isinstance(stored, QuantizedStack):
        matrices = stored.matrices
        return [
            Matrices([packed_struct(matrices, group * parts + part) for group in range(groups)], shape, matrices.dtype)
            for part in range(parts)
        ]
    first, size = library.pointer(layer.weight), shape[0] * shape[1] * layer.weight.element_size()
    return [
        Matrices([first + (group * parts + part) * size for group in range(groups)], shape, layer.weight.dtype)
        for part in range(parts)
    ]
