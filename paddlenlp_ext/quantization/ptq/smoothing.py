"""Move AWQ's smoothing scales from linear layers into the layer that computes their inputs.

    (producer(x) / s) (W diag(s))^T = producer(x) W^T

The producer is a norm or linear layer. The consumers are the linear layers whose inputs are the producer's outputs,
possibly after an elementwise product. The outputs of the model do not change if the producer is divided by s and the
consumers are multiplied by s.

Shapes: C channels of the producer, I inputs of a consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.nn.layer_norm import LayerNorm
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.rms_norm import RMSNorm

Producer = Linear | RMSNorm | LayerNorm


@dataclass(frozen=True)
class SmoothingMapping:
    """Names of a producer and its consumers within a decoder layer.

    Attributes:
        producer: name of a norm or linear layer.
        consumers: names of the linear layers.
        channel_of_input: producer channel of each consumer input, int [I]; None: input i is channel i.
    """

    producer: str
    consumers: tuple[str, ...]
    channel_of_input: np.ndarray | None = None


@paddle.no_grad()
def move_scales(producer: Producer, consumers: Sequence[Linear], scales_C: np.ndarray, channels: np.ndarray) -> None:
    """Divide the producer's channels by the scales [C], and multiply the consumers' columns by the scales."""
    scale = paddle.to_tensor(scales_C)
    offset = producer.offset if isinstance(producer, RMSNorm) else 0.0
    weight = producer.weight.astype("float32")
    divided = weight / scale.unsqueeze(1) if isinstance(producer, Linear) else (weight + offset) / scale - offset
    _assign(producer.weight, divided)
    bias: Any = getattr(producer, "bias", None)
    if bias is not None:
        _assign(bias, bias.astype("float32") / scale)
    for consumer in consumers:
        _assign(consumer.weight, consumer.weight.astype("float32") * paddle.to_tensor(scales_C[channels]))


def _assign(parameter: paddle.Tensor, value: paddle.Tensor) -> None:
    parameter.set_value(value.astype(parameter.dtype))
