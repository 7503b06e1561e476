"""Feed-forward blocks without a gate: squared ReLU (arXiv:2109.08668) and xIELU (arXiv:2411.13010)."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from paddlenlp_ext.nn.feed_forward import FeedForwardLayer
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype


def squared_relu(x: paddle.Tensor) -> paddle.Tensor:
    """Return the squared ReLU of a tensor, `relu(x)**2`."""
    positive = F.relu(x)
    return positive * positive


class SquaredReLU(nn.Layer):
    """Squared ReLU activation, `relu(x)**2`."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return squared_relu(x)


class XIELU(nn.Layer):
    """Activation with a trained quadratic for positive inputs and a trained exponential for negative inputs.

        x > 0     a_p x^2 + beta x                            a_p = softplus(alpha_p)
        x <= 0    a_n (exp(min(x, eps)) - 1 - x) + beta x     a_n = softplus(alpha_n) + beta

    Checkpoints store `beta` and `eps`, which are not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        dtype = activation_dtype(paddle.get_default_dtype())
        self.alpha_p = self.create_parameter([1], dtype=dtype, default_initializer=nn.initializer.Constant(0.2036))
        self.alpha_n = self.create_parameter([1], dtype=dtype, default_initializer=nn.initializer.Constant(-1.0502))
        self.beta = self.create_parameter([], dtype=dtype, default_initializer=nn.initializer.Constant(0.5))
        self.eps = self.create_parameter([], dtype=dtype, default_initializer=nn.initializer.Constant(-1e-6))
        self.beta.stop_gradient = self.eps.stop_gradient = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        dtype = x.dtype
        quadratic = F.softplus(self.alpha_p).astype(dtype)
        exponential = (F.softplus(self.alpha_n) + self.beta).astype(dtype)
        negative = paddle.expm1(paddle.minimum(x, self.eps.astype(dtype))) - x
        return paddle.where(x > 0, quadratic * x * x, exponential * negative) + self.beta.astype(dtype) * x


UNGATED = {"relu2": SquaredReLU, "xielu": XIELU}
"""Layers by the name of the activation in config.json."""


class UngatedFeedForward(FeedForwardLayer):
    """Feed-forward block without a gate: `down(activation(up(x)))`.

    Args:
        hidden_size: input and output features of the block.
        intermediate_size: output features of the up projection.
        bias: whether the linear layers have biases.
        activation: a key of `UNGATED`.
    """

    input_names = ("up_proj",)

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.act_fn = UNGATED[activation]()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., hidden_size] to [..., hidden_size]."""
        up = recompute_region("mlp_column_ln", self.up_proj, x)
        return recompute_region("mlp_row_ln", self.down_proj, self.act_fn(up))
