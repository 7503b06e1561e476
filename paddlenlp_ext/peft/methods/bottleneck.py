"""Bottleneck adapters: a small two-layer network after or parallel to attention and feed-forward sublayers.

    f(z) = act(z W_down^T + b_down) W_up^T + b_up        W_down [r, D], W_up [D, r], act is `activation`
    h = sublayer(x)        x is the normalized input, h the output before the residual connection, s is `scale`

| kind | formula | source |
| --- | --- | --- |
| houlsby (sequential) | y = h + s f(dropout(h)) | Houlsby et al. 2019, arXiv:1902.00751 |
| parallel | y = h + s f(dropout(x)) | He et al. 2021, arXiv:2110.04366 |

W_down starts Kaiming-uniform. W_up and the biases start at zero, so the initial model is bitwise equal to its base.

Shapes: D hidden, r bottleneck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.nn.feed_forward import FeedForwardLayer
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import AdapterLayer, kaiming_uniform, new_parameter
from paddlenlp_ext.peft.registry import PEFT_METHODS

KINDS = ("houlsby", "parallel")
_LOCATIONS: dict[str, tuple[type[nn.Layer], ...]] = {
    "attention": (TokenMixer,),
    "mlp": (FeedForwardLayer, MixtureOfExperts),
    "both": (TokenMixer, FeedForwardLayer, MixtureOfExperts),
}
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": F.tanh}
_FIELDS = ("size", "where", "kind", "activation", "scale", "dropout")


@PEFT_METHODS.register("adapter")
@dataclass(kw_only=True)
class BottleneckConfig(PeftConfig):
    """Options of bottleneck adapters.

    >>> BottleneckConfig(size=16, where="mlp").kind
    'houlsby'
    """

    peft_type: ClassVar[str] = "BOTTLENECK_ADAPTER"
    mergeable: ClassVar[bool] = False

    size: int = option(
        64,
        help="width of the bottleneck",
        minimum=1,
        maximum=65536,
        key="adapter_bottleneck_dim",
        aliases=("adapter_size",),
    )
    where: str = option(
        "both",
        help="sublayers that get an adapter",
        choices=tuple(_LOCATIONS),
        key="adapter_location",
        aliases=("adapter_where",),
    )
    kind: str = option(
        "houlsby",
        help="place of the adapter: after the sublayer (houlsby) or parallel to it (parallel)",
        choices=KINDS,
        key="adapter_type",
        aliases=("adapter_kind",),
    )
    activation: str = option("gelu", help="activation between the two matrices", choices=tuple(ACTIVATIONS))
    scale: float = option(1.0, help="scale of the adapter's output; 4 in the paper on parallel adapters", above=0)
    dropout: float = option(0.0, help="dropout on the adapter's input during training", minimum=0, below=1)

    def targets(self, model: TrainableModel) -> list[str]:
        kinds = _LOCATIONS[self.where]
        return [
            name
            for name, layer in model.named_sublayers()
            if isinstance(layer, kinds) and ".mlp." not in name  # not a shared expert
        ]

    def wrap(self, name: str, base: nn.Layer, seed: int) -> BottleneckAdapter:
        assert isinstance(base, (TokenMixer, FeedForwardLayer, MixtureOfExperts))
        return BottleneckAdapter(base, self, seed, name)

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> BottleneckConfig:
        refuse_unread_fields(fields, set(_FIELDS))
        return cls(**{name: fields[name] for name in _FIELDS if name in fields})


Sublayer = TokenMixer | FeedForwardLayer | MixtureOfExperts


class BottleneckAdapter(AdapterLayer):
    """Sublayer of a decoder layer with a bottleneck adapter.

    Args:
        base: attention, feed-forward or expert layer that maps its first argument [B, S, D] to [B, S, D].
        config: options of the method.
        seed: random seed of the initial values of W_down.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: Sublayer, config: BottleneckConfig, seed: int, name: str) -> None:
        super().__init__(base)
        self.is_parallel, self.scale, self.dropout = config.kind == "parallel", config.scale, config.dropout
        self.activation = ACTIVATIONS[config.activation]
        hidden_size, dtype = _output_of(base)
        down = kaiming_uniform((config.size, hidden_size), seed, f"{name}.adapter_down.weight")
        self.adapter_down = _Dense(down, dtype)
        self.adapter_up = _Dense(np.zeros((hidden_size, config.size), np.float32), dtype)

    def adapter_forward(self, x: paddle.Tensor, *args: Any, **kwargs: Any) -> paddle.Tensor:
        """Map x [B, S, D] to [B, S, D]; other arguments are passed to the base."""
        h = self.base(x, *args, **kwargs)
        inner = x if self.is_parallel else h
        if self.dropout:
            inner = F.dropout(inner, self.dropout, training=self.training)
        return h + self.adapter_up(self.activation(self.adapter_down(inner))) * self.scale


def _output_of(base: Sublayer) -> tuple[int, paddle.dtype]:
    """Return the number and the dtype of the output features of a sublayer."""
    if isinstance(base, MixtureOfExperts):
        return base.router_layer.weight.shape[1], base.experts.down_proj.compute_dtype
    last = base.output_layer if isinstance(base, TokenMixer) else base.down_proj
    return last.out_features, last.compute_dtype


class _Dense(nn.Layer):
    """Linear map x W^T + b, with b = 0 at the start."""

    def __init__(self, weight: np.ndarray, dtype: paddle.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(self, weight, dtype)
        self.bias = new_parameter(self, np.zeros(weight.shape[0], np.float32), dtype)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, self.weight, transpose_y=True) + self.bias
