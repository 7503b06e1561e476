"""Rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864), optionally fused with QK norms.

    (x[i], x[j]) -> (x[i] cos - x[j] sin, x[j] cos + x[i] sin)

| layout | pairs (i, j) | models |
| --- | --- | --- |
| halves | (i, i + R/2) | Llama and most others, in the format of Hugging Face |
| interleaved | (2 i, 2 i + 1) | ERNIE 4.5, Cohere 2, DeepSeek and others, as in the paper |

The cos and sin tables contain the angle of each pair twice: [0, ..., R/2 - 1, 0, ..., R/2 - 1]. Channels R to H - 1 are
not rotated.

| backend | file | notes |
| --- | --- | --- |
| cpp | cpp.py | C++ |
| plain_cpu | plain_cpu.py | plain Paddle, optimized for the CPU |
| triton | triton.py | queries, keys and QK norms in one launch |
| reference | reference.py | plain Paddle; `rotate_heads` calls separate ops for norms and rotations |

Shapes: B batch, S sequence, N query heads, K key heads, H head dimension, R rotated channels of a head.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu_in_fp32
from paddlenlp_ext.ops.rms_norm import rms_norm
from paddlenlp_ext.ops.rope.cpp import rope_cpp
from paddlenlp_ext.ops.rope.plain_cpu import rope_plain_cpu
from paddlenlp_ext.ops.rope.reference import HeadNorms, rope_reference
from paddlenlp_ext.ops.rope.triton import rope_triton, rotate_heads_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton


def rotate_heads_separately(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    cos_BSR: paddle.Tensor,
    sin_BSR: paddle.Tensor,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `rotate_heads` with the best available `rms_norm` and `apply_rope`."""

    def turn(x: paddle.Tensor, weight_H: paddle.Tensor | None) -> paddle.Tensor:
        if norms is None or weight_H is None:
            return apply_rope(x, cos_BSR, sin_BSR, interleaved)
        if norms.after_rotation:
            return rms_norm(apply_rope(x, cos_BSR, sin_BSR, interleaved), weight_H, norms.epsilon, norms.offset)
        return apply_rope(rms_norm(x, weight_H, norms.epsilon, norms.offset), cos_BSR, sin_BSR, interleaved)

    weights = (None, None) if norms is None else (norms.q_weight, norms.k_weight)
    return turn(q_BSNH, weights[0]), turn(k_BSKH, weights[1])


rope_op = DispatchedOp(
    "rope",
    cpp=(rope_cpp, usable),
    plain_cpu=(rope_plain_cpu, on_cpu_in_fp32),
    triton=(rope_triton, floats_on_gpu_with_triton),
    reference=rope_reference,
)
rotate_heads_op = DispatchedOp(
    "rotate_heads", triton=(rotate_heads_triton, floats_on_gpu_with_triton), reference=rotate_heads_separately
)


def apply_rope(
    x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, interleaved: bool = False
) -> paddle.Tensor:
    """Rotate every head of `x_BSNH` with the cos and sin tables of `nn.rotary_embedding.RotaryEmbedding`."""
    return rope_op.choose(x_BSNH)(x_BSNH, cos_BSR, sin_BSR, interleaved)


def rotate_heads(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    cos_BSR: paddle.Tensor,
    sin_BSR: paddle.Tensor,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Apply RoPE to queries and keys; if `norms` is given, apply QK norms before or after the rotation."""
    return rotate_heads_op.choose(q_BSNH)(q_BSNH, k_BSKH, cos_BSR, sin_BSR, interleaved, norms)
