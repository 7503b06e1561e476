"""Config of feed-forwards: the activation that config.json names, and the block of a dense layer."""

from __future__ import annotations

from paddlenlp_ext.models.registry import ConfigReader, Family
from paddlenlp_ext.nn.feed_forward import FeedForward, FeedForwardLayer, ScaledFeedForward
from paddlenlp_ext.nn.ungated_feed_forward import UNGATED, UngatedFeedForward

_GATED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNGATED_ACTIVATIONS = {name: name for name in UNGATED}


def read_activation(config: ConfigReader, family: Family) -> str:
    """Return the value of `DecoderConfig.activation`.

    Raises:
        ValueError: the activation is unknown.
    """
    name = config.value(family.activation_key)
    known = _GATED_ACTIVATIONS if family.gated else _UNGATED_ACTIVATIONS
    if name not in known:
        raise ValueError(f"{family.activation_key} {name!r} in config.json is not supported; known: {', '.join(known)}")
    return known[name]


def dense_feed_forward(
    sizes: tuple[int, int], bias: bool, activation: str, gated: bool, scales: tuple[float, float] | None
) -> FeedForwardLayer:
    """Build the feed-forward block of a dense layer.

    Args:
        sizes: hidden size and intermediate size.
        bias: whether the linear layers have biases.
        activation, gated: see `DecoderConfig`.
        scales: factors of the gate and of the output; None: no factors.
    """
    if scales is not None:
        return ScaledFeedForward(*sizes, bias, activation, scales)
    return (FeedForward if gated else UngatedFeedForward)(*sizes, bias, activation)
