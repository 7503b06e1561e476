"""Mixture of experts: a router sends each token to a few feed-forward blocks (arXiv:1701.06538, arXiv:2101.03961).

    x --> router --> experts and weights of each token
    |                    |
    +--> rows sorted by expert --> gate, up --> act(gate) * up * weight --> down --> sum of a token's rows --> + --> y
    +--> shared expert, which every token uses --------------------------------------------------------------- ^

No token is dropped, regardless of the load of its experts. Router weights multiply the rows before the down projection,
so that the backward pass does not need the output of the down projection.

Shapes: T tokens, K chosen experts, N = T * K rows, E experts, D hidden, F intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.nn.feed_forward import GATES, FeedForward
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.routers import Router, RouterOptions
from paddlenlp_ext.nn.ungated_feed_forward import UngatedFeedForward, squared_relu
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.expert_rows import ExpertRows, add_bias, gather_rows, scale_rows, sum_rows
from paddlenlp_ext.ops.gates import clamped_swiglu
from paddlenlp_ext.paddle_compat import axis_sizes, is_symbolic

_UNGATED = {"relu2": squared_relu}


@dataclass(frozen=True)
class ClampedGate:
    """Clamped SwiGLU of experts (ops/gates).

    Attributes:
        alpha: factor of the gate inside the sigmoid.
        limit: upper bound of the gate; `up` is clamped to [-limit, limit].
    """

    alpha: float
    limit: float

    def __call__(self, gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
        """Return the clamped SwiGLU of gate and up projections of the same shape."""
        return clamped_swiglu(gate, up, self.alpha, self.limit)


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes and options of an expert layer.

    Attributes:
        num_experts: number of routed experts E.
        intermediate_size: F.
        router: options of the router.
        router_name: checkpoint name of the router.
        shared_size: intermediate size of the shared expert; 0: no shared expert.
        shared_name: name of the shared expert in the expert layer; None: the feed-forward block of the decoder layer is
            the shared expert.
        gates_shared: whether a sigmoid gate multiplies the output of the shared expert.
        latent_size: number of input and output features of the routed experts; two linear layers convert from and to
            the hidden size. 0: the hidden size.
        gated: whether the experts have gates; False: `down(activation(up(x)))`.
        activation: activation of the gates, a key of `GATES`; without gates, "relu2".
        clamp: clamped gate that replaces `activation`; None: no clamping.
        bias: whether the experts' linear layers have biases.
    """

    num_experts: int
    intermediate_size: int
    router: RouterOptions
    router_name: str = "gate"
    shared_size: int = 0
    shared_name: str | None = "shared_experts"
    gates_shared: bool = False
    latent_size: int = 0
    gated: bool = True
    activation: str = "silu"
    clamp: ClampedGate | None = None
    bias: bool = False

    @property
    def active_size(self) -> int:
        """Total intermediate size per token: chosen experts plus shared expert."""
        return self.router.top_k * self.intermediate_size + self.shared_size


class Experts(nn.Layer):
    """Feed-forward blocks of all experts.

    Weights are stacked in transformers' layout: `gate_up_proj.weight` [E, 2F, D], with the rows of gate before the rows
    of up, and `down_proj.weight` [E, D, F]. Optional biases: `gate_up_proj_bias` [E, 2F] and `down_proj_bias` [E, D].
    Experts without gates have `up_proj.weight` [E, F, D] in place of `gate_up_proj.weight`, and no biases.

    Attributes:
        input_name: name of the layer that reads the hidden states, `gate_up_proj` or `up_proj`.
        first: index of the first expert on this rank.
        num_local: number of experts on this rank.
    """

    def __init__(self, hidden_size: int, shape: ExpertShape) -> None:
        super().__init__()
        assert shape.gated or not shape.bias, "experts without gates must have no biases"
        self.first, self.gate = 0, shape.clamp or (GATES if shape.gated else _UNGATED)[shape.activation]
        self.num_local = shape.num_experts
        self.input_name, parts = ("gate_up_proj", 2) if shape.gated else ("up_proj", 1)
        inner = GroupedLinear(shape.num_experts, hidden_size, parts * shape.intermediate_size, parts)
        self.add_sublayer(self.input_name, inner)
        self.down_proj = GroupedLinear(shape.num_experts, shape.intermediate_size, hidden_size)
        self.gate_up_proj_bias = self._create_bias(2 * shape.intermediate_size) if shape.bias else None
        self.down_proj_bias = self._create_bias(hidden_size) if shape.bias else None

    @property
    def input_layer(self) -> Any:
        """Layer that reads the hidden states, or the adapter around the layer."""
        return getattr(self, self.input_name)

    def _create_bias(self, size: int) -> paddle.Tensor:
        dtype = activation_dtype(paddle.get_default_dtype())
        return self.create_parameter([self.num_local, size], dtype=dtype, is_bias=True)

    def forward(self, x_TD: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: paddle.Tensor) -> paddle.Tensor:
        """Return the weighted sum of expert outputs [T, D] over the experts on this rank."""
        if is_symbolic(x_TD):
            return self._forward_in_graph(x_TD, weights_TK, experts_TK)
        rows = ExpertRows.sort(experts_TK.numpy(), self.num_local, self.first)
        choices_N = paddle.to_tensor(rows.choices, place=x_TD.place)
        weights_N = paddle.gather(weights_TK.flatten(), choices_N).astype(x_TD.dtype)

        def project(x_TD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
            parts = self.input_layer(gather_rows(x_TD, rows), rows.starts)
            if self.gate_up_proj_bias is None:
                return parts
            biases = paddle.chunk(self.gate_up_proj_bias, 2, axis=-1)
            return tuple(add_bias(part_NF, bias, rows) for part_NF, bias in zip(parts, biases, strict=True))

        def down(inner_NF: paddle.Tensor, weights_N: paddle.Tensor) -> paddle.Tensor:
            (rows_ND,) = self.down_proj(inner_NF, rows.starts)
            if self.down_proj_bias is not None:
                rows_ND = add_bias(rows_ND, self.down_proj_bias, rows, weights_N)
            return sum_rows(rows_ND, rows)

        inner_NF = scale_rows(self.gate(*recompute_region("mlp_column_ln", project, x_TD)), weights_N)
        return recompute_region("mlp_row_ln", down, inner_NF, weights_N)

    def _forward_in_graph(
        self, x_TD: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: paddle.Tensor
    ) -> paddle.Tensor:
        """Trace the forward pass for a static graph, which learns the number of rows per expert only at run time."""
        tokens, results = [], []
        for expert in range(self.num_local):
            chosen_TK = (experts_TK == expert).astype(weights_TK.dtype)
            tokens_N = paddle.nonzero(chosen_TK.sum(1)).flatten()
            weights_N1 = paddle.gather((weights_TK * chosen_TK).sum(1), tokens_N).unsqueeze(1).astype(x_TD.dtype)
            gate_up = self.input_layer.forward_group(paddle.gather(x_TD, tokens_N), expert)
            if self.gate_up_proj_bias is not None:
                biases = paddle.chunk(self.gate_up_proj_bias[expert], 2)
                gate_up = tuple(part_NF + bias_F for part_NF, bias_F in zip(gate_up, biases, strict=True))
            (rows_ND,) = self.down_proj.forward_group(self.gate(*gate_up) * weights_N1, expert)
            if self.down_proj_bias is not None:
                rows_ND = rows_ND + self.down_proj_bias[expert] * weights_N1
            tokens.append(tokens_N)
            results.append(rows_ND)
        return paddle.index_add(paddle.zeros_like(x_TD), paddle.concat(tokens), 0, paddle.concat(results))


class MixtureOfExperts(nn.Layer):
    """Expert layer in place of a `FeedForward`: router, routed experts, and in some families a shared expert."""

    def __init__(self, hidden_size: int, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.add_sublayer(shape.router_name, Router(hidden_size, shape.num_experts, shape.router))
        self.experts = Experts(shape.latent_size or hidden_size, shape)
        self.fc1_latent_proj = Linear(hidden_size, shape.latent_size) if shape.latent_size else None
        self.fc2_latent_proj = Linear(shape.latent_size, hidden_size) if shape.latent_size else None
        self.shared_name = shape.shared_name if shape.shared_size else None
        if self.shared_name is not None:
            feed_forward = FeedForward if shape.gated else UngatedFeedForward
            shared = feed_forward(hidden_size, shape.shared_size, False, shape.activation)
            self.add_sublayer(self.shared_name, shared)
        self.shared_expert_gate = Linear(hidden_size, 1) if shape.gates_shared else None

    @property
    def router_layer(self) -> Any:
        """Router of the layer, or the adapter around the router."""
        return getattr(self, self.shape.router_name)

    @property
    def shared_layer(self) -> Any:
        """Shared expert, or the adapter around it; None without a shared expert in this layer."""
        return None if self.shared_name is None else getattr(self, self.shared_name)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., D] to [..., D]."""
        x_TD = x.reshape([-1, x.shape[-1]])
        routed = self.router_layer(x_TD)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            y_TD = self.experts(x_TD, *routed)
        else:
            y_TD = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x_TD), *routed))
        if self.shared_layer is not None:
            shared_TD = self.shared_layer(x_TD)
            if self.shared_expert_gate is not None:
                shared_TD = paddle.nn.functional.sigmoid(self.shared_expert_gate(x_TD)) * shared_TD
            y_TD = y_TD + shared_TD
        return y_TD.reshape(axis_sizes(x))
