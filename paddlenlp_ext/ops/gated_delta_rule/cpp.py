"""Gated delta rule in C++ (csrc/gated_delta_rule_*.cpp), in chunks, as a single autograd node.

The backward pass computes the states between the chunks again, so only the inputs and the final states are saved.
Inputs in bfloat16 are cast to float32.

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.gated_delta_rule.reference import NORM_EPSILON
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype, needs_grad

_NAMES = ("q", "k", "v", "decay", "beta", "initial")


def gated_delta_rule_cpp(
    q_TGH: paddle.Tensor,
    k_TGH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `gated_delta_rule` in C++."""
    given = (q_TGH, k_TGH, v_TNE, decay_TN, beta_TN, *(() if initial_RNHE is None else (initial_RNHE,)))
    inputs = [contiguous(in_dtype(x, paddle.float32)) for x in given]
    sizes = _sizes(layout, inputs)
    run = _GatedDeltaRule.apply if needs_grad(*inputs) else _forward
    o_TNE, final_RNHE = run(sizes, *inputs)
    return in_dtype(o_TNE, v_TNE.dtype), final_RNHE


def _sizes(layout: AttentionLayout, inputs: list[paddle.Tensor]) -> ctypes.Structure:
    """Check the shapes, because C++ loops would read past the end of tensors, and return the DeltaRuleSizes struct."""
    shapes = [list(x.shape) for x in inputs]
    (count, key_heads, key_dim), (_, heads, value_dim) = shapes[0], shapes[2]
    states = [len(layout.documents()[0]), heads, key_dim, value_dim]
    assert count == layout.num_positions and heads % key_heads == 0, f"{shapes}, {layout.num_positions} positions"
    expected = [shapes[0], shapes[0], [count, heads, value_dim], [count, heads], [count, heads], states]
    assert shapes == expected[: len(shapes)], f"{shapes}, expected {expected}"
    return delta_rule_sizes(layout, (key_heads, heads, key_dim, value_dim))


def delta_rule_sizes(layout: AttentionLayout, shape: tuple[int, int, int, int]) -> ctypes.Structure:
    """Return the DeltaRuleSizes struct for the documents of a layout and the sizes (G, N, H, E)."""
    return layout.cached(("gated delta rule", *shape), lambda: _make_sizes(layout, shape))


def _make_sizes(layout: AttentionLayout, shape: tuple[int, ...]) -> ctypes.Structure:
    arrays = (*layout.documents(), layout.parents())
    addresses = (array.ctypes.data for array in arrays)
    sizes = struct("DeltaRuleSizes")(len(arrays[0]), *shape, *addresses, NORM_EPSILON)
    sizes.arrays = arrays  # keeps the arrays alive; the struct holds only addresses
    return sizes


class _GatedDeltaRule(PyLayer):
    @staticmethod
    def forward(ctx, sizes, *inputs):
        o_TNE, final_RNHE = _forward(sizes, *inputs)
        ctx.save_for_backward(final_RNHE, *inputs)
        ctx.sizes, ctx.needs_grad = sizes, [not x.stop_gradient for x in inputs]
        return o_TNE, final_RNHE

    @staticmethod
    def backward(ctx, o_gradient_TNE, final_gradient_RNHE):
        final_RNHE, *inputs = ctx.saved_tensor()
        named = dict(zip(_NAMES, inputs, strict=False))
        gradients = {f"{name}_gradient": empty(x.shape) for name, x in named.items()}
        outputs = {
            "final": final_RNHE,
            "o_gradient": contiguous(o_gradient_TNE),
            "final_gradient": contiguous(final_gradient_RNHE),
        }
        _run("gated_delta_rule_backward", ctx.sizes, {**named, **outputs, **gradients})
        return tuple(x if needed else None for x, needed in zip(gradients.values(), ctx.needs_grad, strict=True))


def _forward(sizes: ctypes.Structure, *inputs: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    named = dict(zip(_NAMES, inputs, strict=False))
    o_TNE = empty(named["v"].shape)
    final_RNHE = empty([sizes.documents, sizes.heads, sizes.key_dim, sizes.value_dim])
    _run("gated_delta_rule_forward", sizes, {**named, "o": o_TNE, "final": final_RNHE})
    return o_TNE, final_RNHE


def _run(name: str, sizes: ctypes.Structure, tensors: Mapping[str, paddle.Tensor]) -> None:
    """Call an entry point with a DeltaRuleTensors struct; fields missing from `tensors` are null."""
    addresses = struct("DeltaRuleTensors")(**{field: pointer(x) for field, x in tensors.items()})
    function(name)(ctypes.addressof(sizes), ctypes.addressof(addresses))
