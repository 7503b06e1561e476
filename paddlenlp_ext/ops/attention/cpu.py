"""Attention in C++ (csrc/attention_*.cpp), in tiles of 64 queries by 64 keys.

Tiles that causality, a document's end or the window masks are skipped. In addition to the inputs, the output and one
number per query and head are saved for the backward pass. Under `bf16_matmuls` the matmuls round their inputs to
bfloat16, on processors with avx512_bf16; sums and softmax are float32.

Shapes: B batch, S sequence, P prefix positions, N query heads, K key-value heads, H head dimension of queries and keys,
E head dimension of values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention.layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.cpu.api import struct
from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls_enabled
from paddlenlp_ext.ops.cpu.library import empty, function, needs_grad, pointer

_NO_WINDOW = 1 << 40


def attention_cpp(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
    slopes_N: np.ndarray | None = None,
) -> paddle.Tensor:
    """Compute causal attention within each document, as `attention_reference` does."""
    prefix_length = 0 if prefix is None else prefix[0].shape[0]
    shape = (q_BSNH.shape[2], k_BSKH.shape[2], q_BSNH.shape[3], v_BSKE.shape[3], prefix_length)
    key = ("native", *shape, None if slopes_N is None else slopes_N.tobytes())
    sizes = layout.cached(key, lambda: _sizes(layout, *shape, slopes_N))
    inputs = [x.contiguous() for x in (q_BSNH, k_BSKH, v_BSKE, *(prefix or ()))]
    _check_shapes(inputs, layout)
    in_bf16 = bf16_matmuls_enabled()
    if needs_grad(*inputs):
        return _AttentionCpp.apply(sizes, scale, in_bf16, *inputs)
    return _forward(sizes, scale, in_bf16, inputs)[0]


def _check_shapes(inputs: list[paddle.Tensor], layout: AttentionLayout) -> None:
    """Check the sizes on which the C++ loops rely; with wrong sizes they would read past the end of a tensor."""
    (batch, length, heads, head_dim), keys, values = (x.shape for x in inputs[:3])
    assert batch * length == layout.num_positions, f"{batch} x {length} queries, {layout.num_positions} positions"
    assert keys == [batch, length, keys[2], head_dim] and heads % keys[2] == 0, f"{inputs[0].shape}, keys {keys}"
    assert values[:3] == keys[:3], f"keys {keys}, values {values}"
    before = [[inputs[3].shape[0], *own[2:]] for own in (keys, values)] if len(inputs) > 3 else []
    assert [x.shape for x in inputs[3:]] == before, "the prefix's heads do not match"
    assert all(x.dtype == paddle.float32 for x in inputs), f"{[x.dtype.name for x in inputs]}"


class _AttentionCpp(PyLayer):
    @staticmethod
    def forward(ctx, sizes, scale, in_bf16, *inputs):
        out_BSNE, log_sums_NS = _forward(sizes, scale, in_bf16, inputs)
        ctx.save_for_backward(out_BSNE, log_sums_NS, *inputs)
        ctx.sizes, ctx.scale, ctx.in_bf16 = sizes, scale, in_bf16
        ctx.grads_needed = [not x.stop_gradient for x in inputs]
        return out_BSNE

    @staticmethod
    def backward(ctx, out_gradient_BSNE):
        out_BSNE, log_sums_NS, *inputs = ctx.saved_tensor()
        gradients = [empty(x.shape) if wants else None for x, wants in zip(inputs, ctx.grads_needed, strict=True)]
        out_gradient_BSNE = out_gradient_BSNE.contiguous()
        no_prefix = [None] * (5 - len(inputs))
        arguments = [*inputs, *no_prefix, out_BSNE, log_sums_NS, out_gradient_BSNE, *gradients, *no_prefix]
        tensors = struct("AttentionTensors")(*(None if x is None else pointer(x) for x in arguments))
        run = function("attention_backward")
        run(ctypes.addressof(ctx.sizes), ctx.scale, ctypes.addressof(tensors), ctx.in_bf16)
        return tuple(gradients)


def _forward(
    sizes: ctypes.Structure, scale: float, in_bf16: bool, inputs: Sequence[paddle.Tensor]
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the output [B, S, N, E] and, for the backward pass, the log-sum-exp of the scores [N, B * S]."""
    out_BSNE = empty([*inputs[0].shape[:3], sizes.value_dim])
    log_sums_NS = empty([sizes.heads, sizes.positions])
    no_prefix = [None] * (5 - len(inputs))
    tensors = (*map(pointer, inputs), *no_prefix, pointer(out_BSNE), pointer(log_sums_NS))
    function("attention_forward")(ctypes.addressof(sizes), scale, *tensors, in_bf16)
    return out_BSNE, log_sums_NS


def _sizes(
    layout: AttentionLayout,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    prefix_length: int,
    slopes_N: np.ndarray | None,
) -> ctypes.Structure:
    """Return the AttentionSizes struct of a layout."""
    slopes = None if slopes_N is None else np.ascontiguousarray(slopes_N, np.float32)
    assert slopes is None or slopes.shape == (heads,), f"{slopes} for {heads} heads"
    arrays = (*layout.documents(), layout.first_positions(), layout.parents(), slopes)
    window = _NO_WINDOW if layout.window is None else layout.window
    counts = (len(arrays[0]), layout.num_positions, heads, kv_heads, head_dim, value_dim, prefix_length, window)
    sizes = struct("AttentionSizes")(*counts, *(None if array is None else array.ctypes.data for array in arrays))
    sizes.arrays = arrays  # keeps the memory alive that the addresses point to
    return sizes
