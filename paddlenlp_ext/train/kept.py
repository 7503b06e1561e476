"""What a model's linears and adapters keep of the tokens for the way back, read off its layers.

A linear that trains keeps its input as the products read it; a frozen one needs none for itself. LoRA that is one step
with its base keeps the input likewise; every other adapter works on the input as it comes, in full precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from paddle import nn

from paddlenlp_ext.models.activations import Inputs, Ops
from paddlenlp_ext.models.decoder import DecoderLayer
from paddlenlp_ext.nn.attention import Attention
from paddlenlp_ext.nn.feed_forward import FeedForward
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers

_DROPPED = 1.25
"""Numbers that dropout keeps of each: the result, and a byte that says whether it stayed."""


def kept_inputs(model: Any, ops: Ops) -> Inputs:
    """What an average layer of the model keeps.

    Args:
        model: a `CausalLM` or `PeftModel`; only shapes are read.
        ops: what computes.
    """
    layers = [layer for _, layer in model.named_sublayers() if isinstance(layer, DecoderLayer)]
    each = [_of_layer(layer, ops) for layer in layers]
    means = {name: math.fsum(getattr(one, name) for one in each) / len(each) for name in vars(each[0])}
    return Inputs(**means)


def has_ops_apart(model: Any) -> bool:
    """Whether adapters compute beside the linears, in Paddle's own ops."""
    return any(_is_apart(layer) for _, layer in adapter_layers(model))


def _of_layer(layer: DecoderLayer, ops: Ops) -> Inputs:
    parts = list(layer.sublayers())
    attention = next(part for part in parts if isinstance(part, Attention))
    feed_forward = next(part for part in parts if isinstance(part, FeedForward))
    adapters = [part for part in parts if isinstance(part, AdapterLayer)]
    into_attention = attention.q_proj, attention.k_proj, attention.v_proj
    into_feed_forward = feed_forward.gate_proj, feed_forward.up_proj
    return Inputs(
        attention=_of_stream(into_attention, ops),
        result=_of_input([attention.o_proj], ops, 0.0, ops.result),
        feed_forward=_of_stream(into_feed_forward, ops),
        gated=_of_input([feed_forward.down_proj], ops, ops.attention, ops.gated),
        adapters=sum(_own(adapter, ops) for adapter in adapters),
    )


def _of_stream(linears: Iterable[nn.Layer], ops: Ops) -> float:
    """Bytes kept of each number of a norm's result, which these read."""
    if not ops.autocast:
        return _of_input(linears, ops, ops.attention, ops.product)
    products = sum(2 if isinstance(linear, LinearAdapter) else 1 for linear in linears if _reads(linear, ops))
    return products * ops.product


def _of_input(linears: Iterable[nn.Layer], ops: Ops, as_it_comes: float, as_read: float) -> float:
    """Bytes kept of each number of a tensor that these read, where it takes so many in each of the two ways to keep it.

    Both ways are one where they take the same.
    """
    readers = [linear for linear in linears if _reads(linear, ops)]
    return sum({as_it_comes if _is_apart(linear) else as_read for linear in readers})


def _reads(linear: nn.Layer, ops: Ops) -> bool:
    """Whether a gradient needs what the linear reads; Paddle's own product keeps it whether one does or not."""
    if isinstance(linear, LinearAdapter):
        return linear.keeps_input
    return not ops.native or not linear.weight.stop_gradient


def _is_apart(linear: nn.Layer) -> bool:
    """Whether it is an adapter with ops of its own beside the base's."""
    return isinstance(linear, LinearAdapter) and not linear.in_one_step()


def _own(adapter: AdapterLayer, ops: Ops) -> float:
    """Bytes a token that an adapter keeps itself."""
    if not isinstance(adapter, LinearAdapter):
        return ops.attention * adapter.kept_numbers()
    dropped = _DROPPED * adapter.in_features if adapter.dropout else 0.0
    return (ops.attention if _is_apart(adapter) else ops.product) * (adapter.kept_numbers() + dropped)
