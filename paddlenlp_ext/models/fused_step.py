"""Decoding step on a GPU: each norm in one launch with the layers that read it (ops/norm_linear), else as the layers.

A residual addition is part of the launch of the norm that follows it, in the same layer or in the next one. A layer
runs unchanged if it has no norms before attention and feed-forward, has latents or experts, or if one of the parts that
would be fused has an adapter or a hook.

Shapes: B batch, S new positions, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.models.decode_step import norm_names
from paddlenlp_ext.models.layers import PreNormLayer, SandwichLayer
from paddlenlp_ext.nn.attention import Attention, AttentionInputs
from paddlenlp_ext.nn.feed_forward import FeedForward
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized
from paddlenlp_ext.ops.norm_linear import norm_linear, norm_linear_op
from paddlenlp_ext.ops.norm_linear.reference import norm_linear_reference
from paddlenlp_ext.ops.quantized.triton_launch import LARGEST_BATCH
from paddlenlp_ext.paddle_compat import has_forward_hooks
from paddlenlp_ext.quantization.linear import QuantizedLinear

_ATTENTION_LINEARS, _MLP_LINEARS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def run_fused_step(
    layers: nn.LayerList, start: int, stop: int, x_BSD: paddle.Tensor, inputs: AttentionInputs
) -> paddle.Tensor | None:
    """Run the layers `start` to `stop` - 1 over a few new positions; return None if none of them can be fused."""
    if norm_linear_op.choose(x_BSD) is norm_linear_reference or inputs.cache is None:
        return None
    if math.prod(x_BSD.shape[:2]) > LARGEST_BATCH or paddle.is_grad_enabled() or inputs.adapter_inputs is not None:
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
    fusable = [_can_be_fused(layer) for layer in layers]
    if not any(fusable):
        return []
    return [FusedLayer(layer) if can else layer for layer, can in zip(layers, fusable, strict=True)]


def _can_be_fused(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if type(layer) not in (PreNormLayer, SandwichLayer) or type(attention) is not Attention:
        return False
    if type(mlp) is not FeedForward:
        return False
    linears = [getattr(attention, name) for name in _ATTENTION_LINEARS] + [getattr(mlp, name) for name in _MLP_LINEARS]
    norms = [getattr(layer, norm_names(layer)[field]) for field in ("attention_norm", "mlp_norm")]
    return (
        all(type(linear) in (Linear, QuantizedLinear) for linear in linears)
        and all(type(norm) is RMSNorm and norm.shards is None for norm in norms)
        and not any(has_forward_hooks(part) for part in (layer, attention, mlp, *linears, *norms))
    )


class FusedLayer:
    """Decoder layer whose norms are computed with the linear layers that read them.

    Args:
        layer: a layer with norms before attention and feed-forward; its weights must not be replaced.
    """

    def __init__(self, layer: Any) -> None:
        self._scaled = layer.scaled
        self._attention: Attention = layer.self_attn
        self._mlp: FeedForward = layer.mlp
        norms = {field: getattr(layer, name) for field, name in norm_names(layer).items()}
        projections = [_frozen(self._attention, name) for name in _ATTENTION_LINEARS]
        self._before_attention = norms["attention_norm"], projections
        self._before_mlp = norms["mlp_norm"], [_frozen(self._mlp, name) for name in _MLP_LINEARS]
        self._after_attention, self._after_mlp = norms.get("attention_out_norm"), norms.get("mlp_out_norm")

    def __call__(
        self, x_BSD: paddle.Tensor, addend_BSD: paddle.Tensor | None, inputs: AttentionInputs
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Map hidden states `x + addend` [B, S, D] to the two summands of the next ones."""
        x_BSD, projected = _norm_linear(x_BSD, *self._before_attention, addend_BSD)
        attended_BSD = self._added(self._attention.from_projections(projected, inputs), self._after_attention)
        x_BSD, projected = _norm_linear(x_BSD, *self._before_mlp, attended_BSD)
        return x_BSD, self._added(self._mlp.from_projections(projected), self._after_mlp)

    def _added(self, x_BSD: paddle.Tensor, norm: RMSNorm | None) -> paddle.Tensor:
        """Return what an output of attention or feed-forward adds to the hidden states."""
        x_BSD = self._scaled(x_BSD)
        return x_BSD if norm is None else norm(x_BSD)


def _frozen(block: nn.Layer, name: str) -> FrozenDense | FrozenQuantized:
    linear: Any = getattr(block, name)
    is_quantized = isinstance(linear, QuantizedLinear)
    return FrozenQuantized(linear.stored, linear.bias) if is_quantized else FrozenDense(linear.weight, linear.bias)


def _norm_linear(
    x_BSD: paddle.Tensor,
    norm: RMSNorm,
    linears: Sequence[FrozenDense | FrozenQuantized],
    addend_BSD: paddle.Tensor | None,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    return norm_linear(x_BSD, linears, norm.weight, norm.epsilon, norm.offset, addend_BSD)
