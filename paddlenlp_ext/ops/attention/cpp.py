"""Attention in C++ (csrc/attention_*.cpp), in tiles of 64 queries by 64 keys.

Fully masked tiles are skipped. The inputs, the output and the log-sum-exp of the scores are saved for the backward
pass. Under `bf16_matmuls`, on processors with avx512_bf16, the matmuls round their inputs to bfloat16; sums and softmax
are float32.

Shapes: B batch, S sequence, P prefix positions, N query heads, K key-value heads, H head dimension of queries and keys,
E head dimension of values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls_enabled
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.tensor_utils import needs_grad

_NO_WINDOW = 1 << 40


def attention_cpp(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute `attention` in C++."""
    prefix_length = 0 if prefix is None else prefix[0].shape[0]
    shape = (q_BSNH.shape[2], k_BSKH.shape[2], q_BSNH.shape[3], v_BSKE.shape[3], prefix_length)
    sizes = attention_sizes(layout, *shape, options.softcap or 0.0, options.slopes)
    inputs = {"q": q_BSNH, "k": k_BSKH, "v": v_BSKE}
    if prefix is not None:
        inputs |= {"prefix_k": prefix[0], "prefix_v": prefix[1]}
    for sinks_N in options.sink_tensors:
        inputs["sinks"] = sinks_N
    inputs = {name: x.contiguous() for name, x in inputs.items()}
    _check_shapes(inputs, layout)
    in_bf16 = bf16_matmuls_enabled()
    if needs_grad(*inputs.values()):
        return _AttentionCpp.apply(sizes, scale, in_bf16, tuple(inputs), *inputs.values())
    return _forward(sizes, scale, in_bf16, inputs)[0]


def _check_shapes(inputs: Mapping[str, paddle.Tensor], layout: AttentionLayout) -> None:
    """Check shapes and dtypes, because the C++ loops would read past the end of tensors with wrong sizes."""
    (batch, length, heads, head_dim), keys, values = (inputs[name].shape for name in "qkv")
    assert batch * length == layout.num_positions, f"{batch} x {length} queries, {layout.num_positions} positions"
    assert keys == [batch, length, keys[2], head_dim] and heads % keys[2] == 0, f"{inputs['q'].shape}, keys {keys}"
    assert values[:3] == keys[:3], f"keys {keys}, values {values}"
    if "prefix_k" in inputs:
        before = [inputs[name].shape for name in ("prefix_k", "prefix_v")]
        assert before == [[before[0][0], *own[2:]] for own in (keys, values)], (
            "the prefix must have the same heads as the keys and values"
        )
    assert "sinks" not in inputs or inputs["sinks"].shape == [heads], f"{heads} heads need one sink each"
    assert all(x.dtype == paddle.float32 for x in inputs.values()), f"{[x.dtype.name for x in inputs.values()]}"


class _AttentionCpp(PyLayer):
    @staticmethod
    def forward(ctx, sizes, scale, in_bf16, names, *inputs):
        out_BSNE, log_sums_NS = _forward(sizes, scale, in_bf16, dict(zip(names, inputs, strict=True)))
        ctx.save_for_backward(out_BSNE, log_sums_NS, *inputs)
        ctx.sizes, ctx.scale, ctx.in_bf16, ctx.names = sizes, scale, in_bf16, names
        ctx.grads_needed = [not x.stop_gradient for x in inputs]
        return out_BSNE

    @staticmethod
    def backward(ctx, out_gradient_BSNE):
        out_BSNE, log_sums_NS, *inputs = ctx.saved_tensor()
        gradients = [empty(x.shape) if wants else None for x, wants in zip(inputs, ctx.grads_needed, strict=True)]
        outputs = {"out": out_BSNE, "log_sums": log_sums_NS, "out_gradient": out_gradient_BSNE.contiguous()}
        wanted = {f"{name}_gradient": x for name, x in zip(ctx.names, gradients, strict=True) if x is not None}
        tensors = {**dict(zip(ctx.names, inputs, strict=True)), **outputs, **wanted}
        _run("attention_backward", ctx.sizes, ctx.scale, ctx.in_bf16, tensors)
        return tuple(gradients)


def _forward(
    sizes: ctypes.Structure, scale: float, in_bf16: bool, inputs: Mapping[str, paddle.Tensor]
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the output [B, S, N, E] and, for the backward pass, the log-sum-exp of the scores [N, B * S]."""
    out_BSNE = empty([*inputs["q"].shape[:3], sizes.value_dim])
    log_sums_NS = empty([sizes.heads, sizes.positions])
    _run("attention_forward", sizes, scale, in_bf16, {**inputs, "out": out_BSNE, "log_sums": log_sums_NS})
    return out_BSNE, log_sums_NS


def _run(name: str, sizes: ctypes.Structure, scale: float, in_bf16: bool, tensors: Mapping[str, paddle.Tensor]) -> None:
    """Call an entry point with an AttentionTensors struct; fields missing from `tensors` are null."""
    addresses = struct("AttentionTensors")(**{field: pointer(x) for field, x in tensors.items()})
    function(name)(ctypes.addressof(sizes), scale, ctypes.addressof(addresses), in_bf16)


def attention_sizes(
    layout: AttentionLayout,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    prefix_length: int,
    softcap: float,
    slopes_N: np.ndarray | None,
) -> ctypes.Structure:
    """Return the AttentionSizes struct of a pass; the layout caches the struct for all layers with the same sizes."""
    shape = heads, kv_heads, head_dim, value_dim, prefix_length
    key = ("cpp", *shape, softcap, None if slopes_N is None else slopes_N.tobytes())
    return layout.cached(key, lambda: _sizes(layout, *shape, softcap, slopes_N))


def _sizes(
    layout: AttentionLayout,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    prefix_length: int,
    softcap: float,
    slopes_N: np.ndarray | None,
) -> ctypes.Structure:
    slopes = None if slopes_N is None else np.ascontiguousarray(slopes_N, np.float32)
    assert slopes is None or slopes.shape == (heads,), f"{slopes} for {heads} heads"
    arrays = (*layout.documents(), layout.first_positions(), layout.parents(), slopes)
    window = _NO_WINDOW if layout.window is None else layout.window
    counts = (len(arrays[0]), layout.num_positions, heads, kv_heads, head_dim, value_dim, prefix_length, window)
    addresses = (None if array is None else array.ctypes.data for array in arrays)
    sizes = struct("AttentionSizes")(*counts, *addresses, softcap)
    sizes.arrays = arrays  # keeps the arrays alive; the struct holds only addresses
    return sizes
