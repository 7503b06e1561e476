"""Gated delta net: the token mixer of most layers of Qwen3.5 (Yang et al. 2024, arXiv:2412.06464).

    q, k, v = silu(convolution(in_proj_qkv(x)))         causal, depthwise, over the last L positions of the document
    g = -exp(A_log) softplus(in_proj_a(x) + dt_bias)    logarithm of the decay
    o = gated_delta_rule(q, k, v, g, sigmoid(in_proj_b(x)))
    y = out_proj(norm(o) * silu(in_proj_z(x)))          RMS norm of each value head

The decays, the recurrence and the norm are computed in float32 in models of any dtype.

Shapes: B batch, S sequence, T = B * S positions, R documents, D hidden, G key heads, N value heads, H key dimension,
E value dimension, C channels of the convolution, L taps, F = N * E.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

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
from paddlenlp_ext.ops.gated_delta_rule import gated_delta_rule
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import CHUNK
from paddlenlp_ext.ops.tensor_utils import select
from paddlenlp_ext.paddle_compat import axis_sizes


@dataclass(frozen=True, kw_only=True)
class GatedDeltaShape(MixerShape):
    """Sizes of a gated delta net.

    Attributes:
        hidden_size: D.
        num_key_heads: G, a divisor of `num_value_heads`.
        num_value_heads: N.
        key_dim: H.
        value_dim: E.
        num_taps: L, the number of positions that an output of the convolution depends on, including its own.
        norm_epsilon: epsilon of the norm.
        beta_scale: factor of beta. With 2, eigenvalues of the transition between positions may be negative
            (arXiv:2411.12537).
    """

    kind = "gated delta net"
    supports_float16 = False

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    norm_epsilon: float = 1e-6
    beta_scale: float = 1.0

    def build(self, layer_index: int) -> GatedDeltaNet:
        return GatedDeltaNet(self, layer_index)

    @property
    def key_size(self) -> int:
        """Number of channels of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """F, the number of channels of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """C, the number of channels of queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def num_weights(self) -> int:
        return self.hidden_size * (self.num_channels + 2 * self.value_size + 2 * self.num_value_heads)

    @property
    def output_size(self) -> int:
        return self.value_size

    def saved_size(self, in_cpp: bool) -> float:
        """Count the channels at four points, the values before and after the norm, and z before and after the gate.

        The four points are the inputs of the convolution, of its activation and of the split, and the results of the
        split. The reference also saves normalized queries and keys, their copies for each value head, and states of
        chunks.
        """
        saved = 4 * (self.num_channels + self.value_size)
        if in_cpp:
            return saved
        states = self.num_value_heads * self.key_dim * self.value_dim / CHUNK  # one state per chunk
        return saved + 2 * (self.key_size + self.num_value_heads * self.key_dim) + states

    @property
    def sharded_sizes(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.num_key_heads}


class GatedDeltaNet(RecurrentMixer):
    """Gated delta net of one decoder layer.

    Under tensor parallelism, every rank computes `in_proj_qkv` for all heads, and continues with its own heads.

    Attributes:
        shape: sizes on this rank.
        norm_name: name of the norm.
    """

    attribute = "linear_attn"
    input_names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
    output_name = "out_proj"
    norm_name: ClassVar[str] = "norm"

    def __init__(self, shape: GatedDeltaShape, layer_index: int) -> None:
        super().__init__(layer_index)
        self.shape, heads = shape, shape.num_value_heads
        for name, size in zip(self.input_names, self.input_sizes(shape), strict=True):
            setattr(self, name, Linear(shape.hidden_size, size))
        self.conv1d = DepthwiseKernel(shape.num_channels, shape.num_taps)
        rates = nn.initializer.Assign(np.log(np.linspace(1, 16, heads, dtype=np.float32)))
        self.A_log = self.create_parameter([heads], dtype="float32", default_initializer=rates)
        ones = nn.initializer.Constant(1.0)
        self.dt_bias = self.create_parameter([heads], dtype="float32", default_initializer=ones)
        self.add_sublayer(self.norm_name, RMSNorm(shape.value_dim, shape.norm_epsilon, dtype="float32"))
        self.add_sublayer(self.output_name, Linear(shape.value_size, shape.hidden_size))

    @staticmethod
    def input_sizes(shape: GatedDeltaShape) -> tuple[int, ...]:
        """Return the number of outputs of each layer in `input_names`."""
        return shape.num_channels, shape.value_size, shape.num_value_heads, shape.num_value_heads

    def keep_heads(self, index: int, num_parts: int) -> None:
        shape = self.shape
        keys, values = shape.num_key_heads // num_parts, shape.num_value_heads // num_parts
        self.shape = dataclasses.replace(shape, num_key_heads=keys, num_value_heads=values)
        sizes = shape.key_size, shape.key_size, shape.value_size
        self.conv1d.channels = sections_of_rank([(size, num_parts) for size in sizes], index)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Mix the positions of each document; map [B, S, D] to [B, S, D]."""
        qkv_BSC, z_BSF, a_BSN, b_BSN = recompute_region("attention_column_ln", self._project, x_BSD)
        decay_BSN = -self.A_log.exp() * F.softplus(a_BSN.astype("float32") + self.dt_bias)
        beta_BSN = self.shape.beta_scale * F.sigmoid(b_BSN.astype("float32"))
        o_TNE = self.mix((qkv_BSC, decay_BSN, beta_BSN), inputs)
        gated_TF = self._gated(o_TNE, z_BSF.flatten(0, 1)).astype(x_BSD.dtype)
        return recompute_region("attention_row_ln", self.output_layer, gated_TF.reshape(axis_sizes(z_BSF)))

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        """Return queries, keys and values [B, S, C], z [B, S, F], a and b [B, S, N] of the heads on this rank."""
        qkv_BSC, *others = self._outputs(x_BSD)
        return select(qkv_BSC, self.conv1d.channels, axis=2), *others

    def _outputs(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        """Return the outputs of the layers in `input_names`."""
        return tuple(getattr(self, name)(x_BSD) for name in self.input_names)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.A_log.shape[0], self.shape.key_dim, self.shape.value_dim

    def recur(
        self,
        mixed_BSC: paddle.Tensor,
        others: Parts,
        layout: AttentionLayout,
        initial_RNHE: paddle.Tensor | None = None,
        overwrites: bool = False,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        shape, (decay_BSN, beta_BSN) = self.shape, others
        sizes = [shape.key_size, shape.key_size, shape.value_size]
        q_TE, k_TE, v_TE = paddle.split(F.silu(mixed_BSC.flatten(0, 1)), sizes, axis=-1)
        q_TGH, k_TGH = (x_TE.reshape([-1, shape.num_key_heads, shape.key_dim]) for x_TE in (q_TE, k_TE))
        v_TNE = v_TE.reshape([-1, shape.num_value_heads, shape.value_dim])
        decay_TN, beta_TN = decay_BSN.flatten(0, 1), beta_BSN.flatten(0, 1)
        return gated_delta_rule(q_TGH, k_TGH, v_TNE, decay_TN, beta_TN, layout, initial_RNHE, overwrites)

    @property
    def head_norm(self) -> RMSNorm:
        """Norm of each value head."""
        return getattr(self, self.norm_name)

    def _gated(self, o_TNE: paddle.Tensor, z_TF: paddle.Tensor) -> paddle.Tensor:
        """Normalize each value head and multiply it by its gate; return float32 [T, F]."""
        normed_TNE = self.head_norm(o_TNE.astype("float32"))
        return normed_TNE.flatten(1) * F.silu(z_TF.astype("float32"))


@dataclass(frozen=True, kw_only=True)
class FusedGatedDeltaShape(GatedDeltaShape):
    """Sizes of a gated delta net with fused projections."""

    def build(self, layer_index: int) -> FusedGatedDeltaNet:
        return FusedGatedDeltaNet(self, layer_index)


class FusedGatedDeltaNet(GatedDeltaNet):
    """Gated delta net whose projections are fused and sorted by key heads, as in Qwen3-Next.

    For each key head, `in_proj_qkvz` returns q, k, and the v and z of its value heads; `in_proj_ba` returns the b and a
    of its value heads.
    """

    input_names = ("in_proj_qkvz", "in_proj_ba")

    @staticmethod
    def input_sizes(shape: GatedDeltaShape) -> tuple[int, ...]:
        return shape.num_channels + shape.value_size, 2 * shape.num_value_heads

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        shape = self.shape
        ratio = shape.num_value_heads // shape.num_key_heads
        fused_BSG, ba_BSG = (
            y_BSE.reshape([0, 0, shape.num_key_heads, y_BSE.shape[2] // shape.num_key_heads])
            for y_BSE in self._outputs(x_BSD)
        )
        sizes = [shape.key_dim, shape.key_dim, ratio * shape.value_dim, ratio * shape.value_dim]
        *qkv, z = paddle.split(fused_BSG, sizes, axis=-1)
        b, a = paddle.chunk(ba_BSG, 2, axis=-1)
        qkv_BSC = paddle.concat([part.flatten(2) for part in qkv], axis=-1)
        return qkv_BSC, z.flatten(2), a.flatten(2), b.flatten(2)


@dataclass(frozen=True, kw_only=True)
class SplitGatedDeltaShape(GatedDeltaShape):
    """Sizes of a gated delta net with separate projections for queries, keys and values."""

    def build(self, layer_index: int) -> SplitGatedDeltaNet:
        return SplitGatedDeltaNet(self, layer_index)


class SplitGatedDeltaNet(GatedDeltaNet):
    """Gated delta net with separate projections for queries, keys and values, as in OLMo Hybrid; `g_proj` returns z."""

    input_names = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
    output_name = "o_proj"
    norm_name = "o_norm"

    @staticmethod
    def input_sizes(shape: GatedDeltaShape) -> tuple[int, ...]:
        heads = shape.num_value_heads
        return shape.key_size, shape.key_size, shape.value_size, shape.value_size, heads, heads

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        *qkv, z, a, b = self._outputs(x_BSD)
        return paddle.concat(qkv, axis=-1), z, a, b
