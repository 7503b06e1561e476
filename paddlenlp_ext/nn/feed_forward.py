"""Feed-forward blocks of a decoder layer, with a gate: SwiGLU or GeGLU (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.ops.gates import geglu, swiglu

GATES = {"silu": swiglu, "gelu_tanh": geglu}


class FeedForwardLayer(nn.Layer):
    """Base class of feed-forward blocks, which map [..., hidden_size] to [..., hidden_size].

    Attributes:
        input_names: names of the linear layers that read the hidden states.
        down_proj: linear layer that returns the output of the block.
    """

    input_names: tuple[str, ...]
    down_proj: Linear


class FeedForward(FeedForwardLayer):
    """Gated feed-forward block: `down(activation(gate(x)) * up(x))`.

    Args:
        hidden_size: input and output features of the block.
        intermediate_size: output features of the gate and up projections.
        bias: whether the linear layers have biases.
        activation: "silu", or "gelu_tanh" for the tanh approximation of GELU.
    """

    input_names = ("gate_proj", "up_proj")

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, activation: str = "silu") -> None:
        super().__init__()
        self.gate = GATES[activation]
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., hidden_size] to [..., hidden_size]."""
        return self.from_projections(recompute_region("mlp_column_ln", self._gate_and_up, x))

    def from_projections(self, projected: Sequence[paddle.Tensor]) -> paddle.Tensor:
        """Map the outputs of `gate_proj` and `up_proj` to [..., hidden_size]. The call may overwrite `projected`."""
        gate, up = projected
        return recompute_region("mlp_row_ln", self.down_proj, self.gate(gate, up, reuse_inputs=True))

    def _gate_and_up(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self.gate_proj(x), self.up_proj(x)


class ScaledFeedForward(FeedForward):
    """Gated feed-forward block with two factors: `s * down(activation(g * gate(x)) * up(x))`, as in Falcon H1.

    Args:
        hidden_size, intermediate_size, bias, activation: see `FeedForward`.
        scales: factors g of the gate and s of the output.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, activation: str, scales: tuple[float, float]
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, activation)
        self.scales = scales

    def from_projections(self, projected: Sequence[paddle.Tensor]) -> paddle.Tensor:
        gate, up = projected
        return super().from_projections((gate * self.scales[0], up)) * self.scales[1]
