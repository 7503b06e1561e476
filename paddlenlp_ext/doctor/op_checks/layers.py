"""Test cases of the ops in a decoder layer, except attention and quantized weights."""

from __future__ import annotations

import numpy as np
import paddle
from paddle.nn.functional import log_sigmoid, sigmoid

from paddlenlp_ext.doctor.op_checks.case import Inputs, op_case
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.causal_convolution import causal_convolution, document_taps
from paddlenlp_ext.ops.embedding import embedding
from paddlenlp_ext.ops.expert_rows import ExpertRows, gather_rows, sum_rows
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized
from paddlenlp_ext.ops.gated_delta_rule import gated_delta_rule
from paddlenlp_ext.ops.gates import clamped_swiglu, geglu, swiglu
from paddlenlp_ext.ops.grouped_linear import grouped_linear
from paddlenlp_ext.ops.kimi_delta_rule import kimi_delta_rule
from paddlenlp_ext.ops.layer_norm import layer_norm
from paddlenlp_ext.ops.linear import linear, linear_input_gradient_op
from paddlenlp_ext.ops.lora_linear import lora_linear
from paddlenlp_ext.ops.norm_linear import norm_linear
from paddlenlp_ext.ops.rms_norm import add_rms_norm, rms_norm
from paddlenlp_ext.ops.rope import apply_rope, rotate_heads
from paddlenlp_ext.ops.rope.reference import HeadNorms
from paddlenlp_ext.ops.state_space_duality import state_space_duality
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize

EPSILON = 1e-6
CHOICES = np.array([[2, 0], [0, 3], [2, 3], [3, 0], [2, 0]])
"""Indices of the experts to which five tokens are routed; expert 1 has no tokens."""


@op_case("rms_norm")
def run_rms_norm(inputs: Inputs) -> list[paddle.Tensor]:
    """Call RMSNorm without a residual."""
    return [rms_norm(inputs.trained(3, 7, 64), inputs.trained(64), EPSILON)]


@op_case("add_rms_norm")
def run_add_rms_norm(inputs: Inputs) -> list[paddle.Tensor]:
    """Call RMSNorm fused with the residual addition."""
    return [*add_rms_norm(inputs.trained(3, 7, 64), inputs.trained(3, 7, 64), inputs.trained(64), EPSILON)]


@op_case("norm_linear")
def run_norm_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the fused residual addition, RMSNorm and two linear layers, with unquantized and with quantized weights."""
    results = []
    for options in (None, QuantizationConfig(algo="nf4"), QuantizationConfig(algo="weight_only_int8")):
        x, addend = inputs.frozen(3, 64), inputs.frozen(3, 64)
        linears = [_frozen_linear(inputs, rows, options) for rows in (48, 16)]
        total, outputs = norm_linear(x, linears, inputs.frozen(64), EPSILON, 1.0, addend)
        results += [total, *outputs]
    return results


def _frozen_linear(inputs: Inputs, rows: int, options: QuantizationConfig | None) -> FrozenDense | FrozenQuantized:
    bias = inputs.frozen(rows)
    if options is None:
        return FrozenDense(inputs.frozen(rows, 64), bias)
    return FrozenQuantized(quantize(inputs.array(rows, 64), options), bias)


@op_case("layer_norm")
def run_layer_norm(inputs: Inputs) -> list[paddle.Tensor]:
    """Call LayerNorm without bias."""
    return [layer_norm(inputs.trained(3, 7, 64), inputs.trained(64), EPSILON)]


@op_case("swiglu")
def run_swiglu(inputs: Inputs) -> list[paddle.Tensor]:
    """Call SwiGLU on gate and up projections."""
    return [swiglu(inputs.trained(3, 7, 96), inputs.trained(3, 7, 96))]


@op_case("geglu")
def run_geglu(inputs: Inputs) -> list[paddle.Tensor]:
    """Call GeGLU on gate and up projections."""
    return [geglu(inputs.trained(3, 7, 96), inputs.trained(3, 7, 96))]


@op_case("clamped_swiglu")
def run_clamped_swiglu(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the clamped SwiGLU of gpt-oss."""
    return [clamped_swiglu(inputs.trained(3, 7, 96), inputs.trained(3, 7, 96), 1.702, 1.5)]


@op_case("rope")
def run_rope(inputs: Inputs) -> list[paddle.Tensor]:
    """Apply RoPE that pairs the two halves of the channels, and partial RoPE that pairs neighbouring channels."""
    layouts = ((16, False), (8, True))
    return [apply_rope(inputs.trained(2, 7, 4, 16), *_tables(rotated), interleaved) for rotated, interleaved in layouts]


@op_case("rotate_heads")
def run_rotate_heads(inputs: Inputs) -> list[paddle.Tensor]:
    """Apply RoPE to queries and keys in one op, without QK norms and with QK norms before or after RoPE."""
    results = [*rotate_heads(inputs.trained(2, 7, 4, 16), inputs.trained(2, 7, 2, 16), *_tables(8), True)]
    for after in (False, True):
        norms = HeadNorms(inputs.trained(16), inputs.trained(16), EPSILON, 1.0, after)
        pair = inputs.trained(2, 7, 4, 16), inputs.trained(2, 7, 2, 16)
        results += rotate_heads(*pair, *_tables(16), False, norms)
    return results


def _tables(rotated: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return RoPE cosines and sines of 2 x 7 positions for `rotated` channels."""
    angles_BSR = np.tile(np.arange(14).reshape(2, 7, 1) / 10.0 ** np.arange(rotated // 2), 2).astype(np.float32)
    return paddle.to_tensor(np.cos(angles_BSR)), paddle.to_tensor(np.sin(angles_BSR))


@op_case("linear")
def run_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call linear on many rows and on few rows."""
    weight, bias = inputs.trained(48, 64), inputs.trained(48)
    return [linear(inputs.trained(rows, 64), weight, bias) for rows in (21, 2)]


@op_case("linear's gradient")
def run_linear_input_gradient(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute the input gradient of a linear layer."""
    gradient = inputs.frozen(21, 40)
    return [linear_input_gradient_op.choose(gradient)(gradient, inputs.frozen(40, 64))]


@op_case("LoRA linear")
def run_lora_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the fused LoRA linear: many positions with an unquantized base, and few positions with quantized bases."""
    results, formats = [], (QuantizationConfig(algo="nf4"), QuantizationConfig(algo="weight_only_int8"))
    for positions, options in ((75, None), *((5, options) for options in formats)):
        base = _frozen_linear(inputs, 48, options)
        results.append(
            lora_linear(inputs.trained(positions, 64), base, inputs.trained(8, 64), inputs.trained(48, 8), 0.5)
        )
    return results


@op_case("embedding", cpu_dtypes=("float32", "bfloat16"))
def run_embedding(inputs: Inputs) -> list[paddle.Tensor]:
    """Look up token embeddings."""
    return [embedding(inputs.frozen(50, 16), paddle.to_tensor([[3, 0, 49], [7, 7, 1]]))]


@op_case("gather_rows")
def run_gather_rows(inputs: Inputs) -> list[paddle.Tensor]:
    """Gather the hidden states of tokens, ordered by expert."""
    return [gather_rows(inputs.trained(5, 32), ExpertRows.sort(CHOICES, 4))]


@op_case("sum_rows")
def run_sum_rows(inputs: Inputs) -> list[paddle.Tensor]:
    """Sum the expert outputs of each token."""
    return [sum_rows(inputs.trained(10, 32), ExpertRows.sort(CHOICES, 4))]


@op_case("grouped_linear")
def run_grouped_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the grouped linear layer of the experts."""
    return [*grouped_linear(inputs.trained(10, 64), inputs.trained(4, 96, 64), ExpertRows.sort(CHOICES, 4).starts, 2)]


@op_case("causal convolution")
def run_causal_convolution(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the causal convolution on two documents and a branch of the second document."""
    layout = AttentionLayout.from_documents([[5, 9, 3]], document_parents=[[None, None, 1]])
    x_ND, weight_DL, bias_D = inputs.trained(17, 24), inputs.trained(24, 4), inputs.trained(24)
    return [causal_convolution(x_ND, weight_DL, document_taps(layout, 4), bias_D)]


@op_case("gated delta rule")
def run_gated_delta_rule(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the gated delta rule on documents of one chunk and of several chunks, and a branch, with initial states."""
    layout = AttentionLayout.from_documents([[5, 130, 3]], document_parents=[[None, None, 1]])
    q_TGH, k_TGH, v_TNE = inputs.trained(138, 2, 16), inputs.trained(138, 2, 16), inputs.trained(138, 4, 8)
    decay_TN, beta_TN = (inputs.trained(138, 4).astype("float32") for _ in range(2))
    initial_RNHE = inputs.trained(3, 4, 16, 8).astype("float32")
    log_decay_TN = log_sigmoid(decay_TN)
    return [*gated_delta_rule(q_TGH, k_TGH, v_TNE, log_decay_TN, sigmoid(beta_TN), layout, initial_RNHE)]


@op_case("Kimi delta rule")
def run_kimi_delta_rule(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the Kimi delta rule on documents of one chunk and of several chunks, and a branch, with initial states."""
    layout = AttentionLayout.from_documents([[5, 130, 3]], document_parents=[[None, None, 1]])
    q_TNH, k_TNH, v_TNE = inputs.trained(138, 2, 16), inputs.trained(138, 2, 16), inputs.trained(138, 2, 8)
    decay_TNH, beta_TN = (inputs.trained(*shape).astype("float32") for shape in ((138, 2, 16), (138, 2)))
    initial_RNHE = inputs.trained(3, 2, 16, 8).astype("float32")
    log_decay_TNH = log_sigmoid(decay_TNH)
    return [*kimi_delta_rule(q_TNH, k_TNH, v_TNE, log_decay_TNH, sigmoid(beta_TN), layout, initial_RNHE)]


@op_case("state space duality")
def run_state_space_duality(inputs: Inputs) -> list[paddle.Tensor]:
    """Call state space duality on documents of one chunk and of several chunks, and a branch, with initial states."""
    layout = AttentionLayout.from_documents([[5, 130, 3]], document_parents=[[None, None, 1]])
    c_TGH, b_TGH, dx_TNE = inputs.trained(138, 1, 16), inputs.trained(138, 1, 16), inputs.trained(138, 4, 8)
    decay_TN = log_sigmoid(inputs.trained(138, 4).astype("float32"))
    initial_RNHE = inputs.trained(3, 4, 16, 8).astype("float32")
    return [*state_space_duality(c_TGH, b_TGH, dx_TNE, decay_TN, layout, initial_RNHE)]
