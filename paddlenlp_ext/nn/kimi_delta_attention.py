"""Kimi delta attention (KDA): the token mixer of most layers of Kimi Linear (arXiv:2510.26692).

    q, k, v = silu(convolution(projections of x))       causal, depthwise, over the last L positions of the document
    g = -exp(A_log) softplus(f_b(f_a(x)) + dt_bias)     logarithm of the decay, of each channel of the keys
    o = kimi_delta_rule(q, k, v, g, sigmoid(b(x)))
    out = o_proj(norm(o) * sigmoid(g_b(g_a(x))))        RMS norm of each head

The decays, the recurrence and the norm are computed in float32 in models of any dtype.

Shapes: B batch, S sequence, T = B * S positions, R documents, D hidden, N heads, H head dimension of keys and values,
C channels of the convolution, L taps, F = N * H.
"""

from __future__ import annotations

import dataclasses
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
from paddlenlp_ext.ops.kimi_delta_rule import kimi_delta_rule
from paddlenlp_ext.ops.kimi_delta_rule.reference import CHUNK
from paddlenlp_ext.paddle_compat import axis_sizes


@dataclass(frozen=True, kw_only=True)
class KimiDeltaShape(MixerShape):
    """Sizes of Kimi delta attention.

    Attributes:
        hidden_size: D.
        num_heads: N.
        head_dim: H, also the rank of the projections of decays and gates.
        num_taps: L, the number of positions that an output of the convolution depends on, including its own.
        norm_epsilon: epsilon of the norm.
    """

    kind = "Kimi delta attention"
    supports_float16 = False

    hidden_size: int
    num_heads: int
    head_dim: int
    num_taps: int
    norm_epsilon: float = 1e-6

    def build(self, layer_index: int) -> KimiDeltaAttention:
        return KimiDeltaAttention(self, layer_index)

    @property
    def inner_size(self) -> int:
        """F, the number of channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_weights(self) -> int:
        low_rank = 2 * self.head_dim * (self.hidden_size + self.inner_size)
        return self.hidden_size * (4 * self.inner_size + self.num_heads) + low_rank

    @property
    def output_size(self) -> int:
        return self.inner_size

    def saved_size(self, in_cpp: bool) -> float:
        """Count the tensors [T, F] and two tensors [T, H].

        The tensors [T, F] are q, k and v before the convolution, before and after the activation, and after the split;
        the decays before and after softplus, and after their scale; the input and output of the norm, and the gate.
        The reference saves four more tensors, in chunks, and the states between chunks.
        """
        saved = 18 * self.inner_size + 2 * self.head_dim
        states = self.num_heads * self.head_dim**2 / CHUNK
        return saved if in_cpp else saved + 4 * self.inner_size + states

    @property
    def sharded_sizes(self) -> dict[str, int]:
        return {"number of heads of Kimi delta attention": self.num_heads}


class ForgetGate(nn.Layer):
    """Projections and parameters of the decays; `A_log` has the shape [1, 1, N, 1], as in files."""

    def __init__(self, shape: KimiDeltaShape) -> None:
        super().__init__()
        self.f_a_proj = Linear(shape.hidden_size, shape.head_dim)
        self.f_b_proj = Linear(shape.head_dim, shape.inner_size)
        ones = nn.initializer.Constant(1.0)
        self.dt_bias = self.create_parameter([shape.inner_size], dtype="float32", default_initializer=ones)
        rates = np.log(np.linspace(1, 16, shape.num_heads, dtype=np.float32)).reshape([1, 1, -1, 1])
        self.A_log = self.create_parameter(
            rates.shape, dtype="float32", default_initializer=nn.initializer.Assign(rates)
        )

    def decays(self, f_BSNH: paddle.Tensor) -> paddle.Tensor:
        """Map the outputs of `f_b_proj` to the logarithms of the decays, float32 [B, S, N, H]."""
        bias_NH = self.dt_bias.reshape(f_BSNH.shape[2:])
        return -self.A_log.exp() * F.softplus(f_BSNH.astype("float32") + bias_NH)


class KimiDeltaAttention(RecurrentMixer):
    """Kimi delta attention of one decoder layer.

    Attributes:
        shape: sizes on this rank.
    """

    attribute = "self_attn"
    input_names = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    latent_names = ("forget_gate.f_b_proj", "g_b_proj")

    def __init__(self, shape: KimiDeltaShape, layer_index: int) -> None:
        super().__init__(layer_index)
        self.shape, inner = shape, shape.inner_size
        self.q_proj = Linear(shape.hidden_size, inner)
        self.k_proj = Linear(shape.hidden_size, inner)
        self.v_proj = Linear(shape.hidden_size, inner)
        self.conv1d = DepthwiseKernel(3 * inner, shape.num_taps)
        self.forget_gate = ForgetGate(shape)
        self.b_proj = Linear(shape.hidden_size, shape.num_heads)
        self.g_a_proj = Linear(shape.hidden_size, shape.head_dim)
        self.g_b_proj = Linear(shape.head_dim, inner)
        self.o_norm = RMSNorm(shape.head_dim, shape.norm_epsilon, dtype="float32")
        self.o_proj = Linear(inner, shape.hidden_size)

    def head_tensors(self) -> list[tuple[nn.Layer, str, int]]:
        return [(self.forget_gate, "A_log", 2), (self.forget_gate, "dt_bias", 0)]

    def keep_heads(self, index: int, num_parts: int) -> None:
        inner = self.shape.inner_size
        self.shape = dataclasses.replace(self.shape, num_heads=self.shape.num_heads // num_parts)
        self.conv1d.channels = sections_of_rank([(inner, num_parts)] * 3, index)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Mix the positions of each document; map [B, S, D] to [B, S, D]."""
        qkv_BSC, f_BSF, b_BSN, gate_BSF = recompute_region("attention_column_ln", self._project, x_BSD)
        decay_BSNH = self.forget_gate.decays(self._heads(f_BSF))
        o_TNH = self.mix((qkv_BSC, decay_BSNH, F.sigmoid(b_BSN.astype("float32"))), inputs)
        gated_TF = self.o_norm(o_TNH.astype("float32")).flatten(1) * F.sigmoid(gate_BSF.flatten(0, 1).astype("float32"))
        return recompute_region(
            "attention_row_ln", self.o_proj, gated_TF.astype(x_BSD.dtype).reshape(axis_sizes(gate_BSF))
        )

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        """Return queries, keys and values [B, S, C], inputs of decays [B, S, F], b [B, S, N] and gates [B, S, F]."""
        qkv_BSC = paddle.concat([project(x_BSD) for project in (self.q_proj, self.k_proj, self.v_proj)], axis=-1)
        f_BSF = self.forget_gate.f_b_proj(self.forget_gate.f_a_proj(x_BSD))
        return qkv_BSC, f_BSF, self.b_proj(x_BSD), self.g_b_proj(self.g_a_proj(x_BSD))

    def _heads(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., F] to [..., N, H]."""
        return x.reshape([*axis_sizes(x)[:-1], self.shape.num_heads, self.shape.head_dim])

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.shape.head_dim, self.shape.head_dim

    def recur(
        self,
        mixed_BSC: paddle.Tensor,
        others: Parts,
        layout: AttentionLayout,
        initial_RNHE: paddle.Tensor | None = None,
        overwrites: bool = False,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        decay_BSNH, beta_BSN = others
        qkv = paddle.chunk(F.silu(mixed_BSC.flatten(0, 1)), 3, axis=-1)
        q_TNH, k_TNH, v_TNH = (self._heads(x_TF) for x_TF in qkv)
        decay_TNH, beta_TN = decay_BSNH.flatten(0, 1), beta_BSN.flatten(0, 1)
        return kimi_delta_rule(q_TNH, k_TNH, v_TNH, decay_TNH, beta_TN, layout, initial_RNHE, overwrites)
