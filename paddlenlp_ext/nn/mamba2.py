"""Mamba-2: a token mixer of Granite 4 H, Nemotron H and Falcon H1 (Dao and Gu 2024, arXiv:2405.21060).

    z, xbc, dt = in_proj(u)                             times a factor per section in Falcon H1
    x, B, C = silu(convolution(xbc))                    causal, depthwise, over the last L positions of the document
    d = softplus(dt + dt_bias)                          step size, clipped to the limits of the model
    y = state_space_duality(C, B, d x, -exp(A_log) d) + D x
    out = out_proj(norm(y * silu(z)))                   RMS norm of each group

In Falcon H1, the norm comes before the gate, `norm(y) * silu(z)`, or is absent.

The step sizes, the recurrence and the norm are computed in float32 in models of any dtype.

Shapes: B batch, S sequence, T = B * S positions, R documents, D hidden, G groups, N heads, H state dimension,
E head dimension, C channels of the convolution, L taps, F = N * E.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.recurrent_mixer import Parts, RecurrentMixer, sections_of_rank
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.short_convolution import DepthwiseKernel
from paddlenlp_ext.nn.token_mixer import MixerShape
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import CHUNK
from paddlenlp_ext.ops.state_space_duality import state_space_duality
from paddlenlp_ext.ops.tensor_utils import select
from paddlenlp_ext.paddle_compat import axis_sizes


@dataclass(frozen=True, kw_only=True)
class Mamba2Shape(MixerShape):
    """Sizes and options of a Mamba-2 mixer.

    Attributes:
        hidden_size: D.
        num_heads: N.
        num_groups: G, a divisor of `num_heads`; heads of a group share B and C.
        head_dim: E.
        state_dim: H.
        num_taps: L, the number of positions that an output of the convolution depends on, including its own.
        conv_bias: whether the convolution has a bias.
        bias: whether the linear layers have biases.
        step_limits: smallest and largest step size.
        norm_epsilon: epsilon of the norm.
        norm: "gate_first", "norm_first", or None without a norm.
        section_scales: factors of z, x, B, C and dt; None: no factors.
    """

    kind = "Mamba-2"
    supports_float16 = False

    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    num_taps: int
    conv_bias: bool = True
    bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)
    norm_epsilon: float = 1e-6
    norm: str | None = "gate_first"
    section_scales: tuple[float, ...] | None = None

    def build(self, layer_index: int) -> Mamba2:
        return Mamba2(self, layer_index)

    @property
    def inner_size(self) -> int:
        """F, the number of channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Number of channels of B over all groups; C has the same number."""
        return self.num_groups * self.state_dim

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: x, B and C together."""
        return self.inner_size + 2 * self.group_size

    @property
    def section_sizes(self) -> list[int]:
        """Number of outputs of the input projection for each of z, x, B, C and dt."""
        return [self.inner_size, self.inner_size, self.group_size, self.group_size, self.num_heads]

    @property
    def num_weights(self) -> int:
        return self.hidden_size * (2 * self.inner_size + self.num_channels + self.num_heads)

    @property
    def output_size(self) -> int:
        return self.inner_size

    def saved_size(self, in_cpp: bool) -> float:
        """Count the channels at three points, B and C per group, and seven tensors [T, F], or five without a norm.

        The three points are the inputs of the convolution, of its activation and of the split. The tensors are x, d x,
        y, z before and after its activation, and the input of the norm before and after the normalization. The
        reference also saves B and C per head, and states of chunks.
        """
        saved = 3 * self.num_channels + 2 * self.group_size + (7 if self.norm else 5) * self.inner_size
        if in_cpp:
            return saved
        states = self.num_heads * self.state_dim * self.head_dim / CHUNK  # one state per chunk
        return saved + 2 * self.num_heads * self.state_dim + states

    @property
    def sharded_sizes(self) -> dict[str, int]:
        groups = {"number of Mamba-2 groups": self.num_groups} if self.num_groups > 1 else {}
        return {"number of Mamba-2 heads": self.num_heads, **groups}


class GroupedRMSNorm(RMSNorm):
    """RMS normalization of each of `num_groups` equal parts of the last axis; the weight is float32.

    Each tensor-parallel rank holds whole groups, or a part of the only group.
    """

    def __init__(self, size: int, epsilon: float, num_groups: int) -> None:
        super().__init__(size, epsilon, dtype="float32")
        self.num_groups = num_groups

    def normalize(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size] with `weight` [size] in place of the layer's weight."""
        if self.shards is not None and self.num_groups == 1:
            return self._norm_sharded(x, weight, self.shards)
        num_groups = self.num_groups // (1 if self.shards is None else self.shards.size)
        grouped = x.reshape([*[0] * (x.ndim - 1), num_groups, x.shape[-1] // num_groups])
        inverse = (grouped.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return (grouped * inverse).flatten(-2) * weight


class Mamba2(RecurrentMixer):
    """Mamba-2 mixer of one decoder layer.

    Under tensor parallelism, every rank computes the input projection of all heads, and continues with its own heads
    and their groups.

    Attributes:
        shape: sizes on this rank.
        outputs: slices of the outputs of `in_proj` that this rank reads, z, x, B, C and dt; None: all outputs.
    """

    attribute = "mamba"
    input_names = ("in_proj",)
    output_name = "out_proj"
    outputs: Sequence[slice] | None = None

    def __init__(self, shape: Mamba2Shape, layer_index: int) -> None:
        super().__init__(layer_index)
        self.shape, heads, inner = shape, shape.num_heads, shape.inner_size
        self.in_proj = Linear(shape.hidden_size, inner + shape.num_channels + heads, shape.bias)
        self.conv1d = DepthwiseKernel(shape.num_channels, shape.num_taps, shape.conv_bias)
        rates = nn.initializer.Assign(np.log(np.arange(1, heads + 1, dtype=np.float32)))
        self.A_log = self.create_parameter([heads], dtype="float32", default_initializer=rates)
        ones = nn.initializer.Constant(1.0)
        self.D = self.create_parameter([heads], dtype="float32", default_initializer=ones)
        self.dt_bias = self.create_parameter([heads], dtype="float32", default_initializer=ones)
        self.norm = GroupedRMSNorm(inner, shape.norm_epsilon, shape.num_groups) if shape.norm else None
        self.out_proj = Linear(inner, shape.hidden_size, shape.bias)

    def head_tensors(self) -> list[tuple[nn.Layer, str, int]]:
        return [*super().head_tensors(), (self, "D", 0)]

    def keep_heads(self, index: int, num_parts: int) -> None:
        shape = self.shape
        group_parts = num_parts if shape.num_groups > 1 else 1  # all ranks read the B and C of a single group
        heads, groups = shape.num_heads // num_parts, shape.num_groups // group_parts
        self.shape = dataclasses.replace(shape, num_heads=heads, num_groups=groups)
        sections = [
            *((shape.inner_size, num_parts), (shape.inner_size, num_parts)),
            *((shape.group_size, group_parts), (shape.group_size, group_parts)),
            (shape.num_heads, num_parts),
        ]
        self.outputs = sections_of_rank(sections, index)
        self.conv1d.channels = sections_of_rank(sections[1:4], index)

    def _project(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        """Return z, x, B, C and dt of the heads on this rank."""
        return select(self.in_proj(x_BSD), self.outputs, axis=2)

    def _sections(self, projected: paddle.Tensor) -> Sequence[paddle.Tensor]:
        """Split the output of `_project` into z, the input of the convolution, and dt, and scale the sections."""
        shape = self.shape
        if shape.section_scales is None:
            return paddle.split(projected, [shape.inner_size, shape.num_channels, shape.num_heads], axis=-1)
        parts = zip(paddle.split(projected, shape.section_sizes, axis=-1), shape.section_scales, strict=True)
        z_BSF, *xbc, dt_BSN = (part * scale for part, scale in parts)
        return z_BSF, paddle.concat(xbc, axis=-1), dt_BSN

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Mix the positions of each document; map [B, S, D] to [B, S, D]."""
        z_BSF, xbc_BSC, dt_BSN = self._sections(recompute_region("attention_column_ln", self._project, x_BSD))
        y_TNE = self.mix((xbc_BSC, dt_BSN), inputs)
        y_BSF, gate_BSF = y_TNE.reshape(axis_sizes(z_BSF)), F.silu(z_BSF.astype("float32"))
        if self.norm is None:
            gated_BSF = y_BSF * gate_BSF
        elif self.shape.norm == "norm_first":
            gated_BSF = self.norm(y_BSF) * gate_BSF
        else:
            gated_BSF = self.norm(y_BSF * gate_BSF)
        return recompute_region("attention_row_ln", self.out_proj, gated_BSF.astype(x_BSD.dtype))

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.shape.state_dim, self.shape.head_dim

    def recur(
        self,
        mixed_BSC: paddle.Tensor,
        others: Parts,
        layout: AttentionLayout,
        initial_RNHE: paddle.Tensor | None = None,
        overwrites: bool = False,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        shape, (dt_BSN,) = self.shape, others
        xbc_TC = F.silu(mixed_BSC.flatten(0, 1))
        x_TF, *bc = paddle.split(xbc_TC, [shape.inner_size, shape.group_size, shape.group_size], axis=-1)
        b_TGH, c_TGH = (part.reshape([-1, shape.num_groups, shape.state_dim]) for part in bc)
        x_TNE = x_TF.reshape([-1, shape.num_heads, shape.head_dim]).astype("float32")
        step_TN = self._steps(dt_BSN.flatten(0, 1))
        decay_TN = -self.A_log.exp() * step_TN
        dx_TNE = step_TN.unsqueeze(-1) * x_TNE
        y_TNE, after_RNHE = state_space_duality(c_TGH, b_TGH, dx_TNE, decay_TN, layout, initial_RNHE, overwrites)
        return y_TNE + self.D.unsqueeze(-1) * x_TNE, after_RNHE

    def _steps(self, dt_TN: paddle.Tensor) -> paddle.Tensor:
        """Return the step sizes, float32 [T, N]."""
        step_TN = F.softplus(dt_TN.astype("float32") + self.dt_bias)
        smallest, largest = self.shape.step_limits
        step_TN = step_TN.clip(min=smallest) if smallest > 0 else step_TN
        return step_TN if math.isinf(largest) else step_TN.clip(max=largest)
