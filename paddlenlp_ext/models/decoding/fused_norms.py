"""Decoding step on a GPU: each norm in one launch with the quantized layers that read it (ops/norm_linear).

A residual addition is part of the launch of the norm that follows it, in the same layer or in the next one. A block
runs as it is if it has no norm before it, has latents or experts, or if its norm or one of the linear layers has an
adapter or a hook. So does one with dense weights: decoding waits for Python, which takes longer to launch the kernel
than to call a norm and Paddle's products (docs/gpu.md).

Shapes: B batch, S new positions, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.models.decoder_layers import PreNormLayer, SandwichLayer
from paddlenlp_ext.models.decoding.cpp_layers import norm_names
from paddlenlp_ext.nn.attention import Attention, AttentionInputs
from paddlenlp_ext.nn.feed_forward import FeedForward
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.frozen_linear import FrozenQuantized
from paddlenlp_ext.ops.norm_linear import norm_linear, norm_linear_op
from paddlenlp_ext.ops.norm_linear.reference import norm_linear_reference
from paddlenlp_ext.ops.quantized.triton_launch import MOST_POSITIONS
from paddlenlp_ext.paddle_compat import has_forward_hooks
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear

_LINEARS: dict[type[nn.Layer], tuple[str, ...]] = {
    Attention: ("q_proj", "k_proj", "v_proj"),
    FeedForward: ("gate_proj", "up_proj"),
}
"""Block -> the linear layers that read its input."""


def run_fused_norms(
    layers: nn.LayerList, start: int, stop: int, x_BSD: paddle.Tensor, inputs: AttentionInputs
) -> paddle.Tensor | None:
    """Run the layers `start` to `stop` - 1 over a few new positions; return None if none of them can be fused."""
    if norm_linear_op.choose(x_BSD) is norm_linear_reference or inputs.cache is None:
        return None
    if math.prod(x_BSD.shape[:2]) > MOST_POSITIONS or paddle.is_grad_enabled() or inputs.adapter_inputs is not None:
        return None
    steps = inputs.cache.derived((FusedLayer, start, stop), lambda: _prepare([*layers][start:stop]))
    if not steps:
        return None
    addend_BSD = None
    for step in steps:
        if isinstance(step, FusedLayer):
            x_BSD, addend_BSD = step(x_BSD, addend_BSD, inputs)
        else:
            x_BSD, addend_BSD = step(x_BSD if addend_BSD is None else x_BSD + addend_BSD, inputs), None
    return x_BSD if addend_BSD is None else x_BSD + addend_BSD


def _prepare(layers: Sequence[Any]) -> list[Any]:
    """Return the layers, fused where that is possible; an empty list if it is for none of them."""
    steps = [
        FusedLayer(layer) if type(layer) in (PreNormLayer, SandwichLayer) and not has_forward_hooks(layer) else layer
        for layer in layers
    ]
    return steps if any(isinstance(step, FusedLayer) and step.launches for step in steps) else []


class FusedLayer:
    """Decoder layer whose norms are computed with the linear layers that read them, where that is possible.

    Attributes:
        launches: number of the blocks for which it is.

    Args:
        layer: a layer with norms before attention and feed-forward; its weights must not be replaced.
    """

    def __init__(self, layer: Any) -> None:
        norms = {field: getattr(layer, name) for field, name in norm_names(layer).items()}
        self._attention = _Block(layer.self_attn, norms["attention_norm"])
        self._mlp = _Block(layer.mlp, norms["mlp_norm"])
        self._scaled, self._out_norms = layer.scaled, (norms.get("attention_out_norm"), norms.get("mlp_out_norm"))
        self.launches = self._attention.is_fused + self._mlp.is_fused

    def __call__(
        self, x_BSD: paddle.Tensor, addend_BSD: paddle.Tensor | None, inputs: AttentionInputs
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Map hidden states `x + addend` [B, S, D] to the two summands of the next ones."""
        if addend_BSD is not None and not self._attention.is_fused:
            x_BSD, addend_BSD = x_BSD + addend_BSD, None
        x_BSD, attended_BSD = self._attention(x_BSD, addend_BSD, inputs)
        x_BSD, out_BSD = self._mlp(x_BSD, self._added(attended_BSD, self._out_norms[0]))
        return x_BSD, self._added(out_BSD, self._out_norms[1])

    def _added(self, x_BSD: paddle.Tensor, norm: nn.Layer | None) -> paddle.Tensor:
        """Return what an output of attention or feed-forward adds to the hidden states."""
        x_BSD = self._scaled(x_BSD)
        return x_BSD if norm is None else norm(x_BSD)


class _Block:
    """Attention or feed-forward block with the norm before it.

    Attributes:
        is_fused: whether the norm is computed with the linear layers that read it.
    """

    def __init__(self, block: Any, norm: Any) -> None:
        self._block, self._norm = block, norm
        linears = [getattr(block, name) for name in _LINEARS.get(type(block), ())]
        self.is_fused = (
            bool(linears)
            and all(type(linear) is QuantizedLinear for linear in linears)
            and type(norm) is RMSNorm
            and norm.shards is None
            and not any(has_forward_hooks(part) for part in (block, norm, *linears))
        )
        self._linears = [FrozenQuantized(each.stored, each.bias) for each in linears] if self.is_fused else []

    def __call__(
        self, x_BSD: paddle.Tensor, addend_BSD: paddle.Tensor | None, *inputs: AttentionInputs
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return `x + addend` [B, S, D] and the output of the block for its norm."""
        norm = self._norm
        if self.is_fused:
            total_BSD, projected = norm_linear(x_BSD, self._linears, norm.weight, norm.epsilon, norm.offset, addend_BSD)
            return total_BSD, self._block.from_projections(projected, *inputs)
        total_BSD, normed_BSD = (x_BSD, norm(x_BSD)) if addend_BSD is None else norm.forward_add(x_BSD, addend_BSD)
        return total_BSD, self._block(normed_BSD, *inputs)
