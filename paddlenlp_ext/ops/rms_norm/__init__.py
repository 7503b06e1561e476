"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), optionally fused with a residual addition.

    y = x / sqrt(mean(x^2) + epsilon) * (offset + weight)        offset: 1 in the Gemma models, otherwise 0

| backend | file | notes |
| --- | --- | --- |
| cpp | cpp.py | C++ |
| plain_cpu | plain_cpu.py | plain Paddle, optimized for the CPU |
| triton | triton.py, kernels.py (tile sizes, launches) | one pass forward and one backward, in float32 |
| reference | reference.py | plain Paddle; rounds to the dtype of x before the scale is applied |

Shapes: D row length.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu_in_fp32
from paddlenlp_ext.ops.rms_norm.cpp import add_rms_norm_cpp, rms_norm_cpp
from paddlenlp_ext.ops.rms_norm.plain_cpu import rms_norm_plain_cpu
from paddlenlp_ext.ops.rms_norm.reference import rms_norm_reference
from paddlenlp_ext.ops.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton


def add_rms_norm_reference(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return `x + addend` and the normalized sum, with the best available `rms_norm`."""
    total = x + addend
    return total, rms_norm(total, weight_D, epsilon, offset)


rms_norm_op = DispatchedOp(
    "rms_norm",
    cpp=(rms_norm_cpp, usable),
    plain_cpu=(rms_norm_plain_cpu, on_cpu_in_fp32),
    triton=(rms_norm_triton, floats_on_gpu_with_triton),
    reference=rms_norm_reference,
)
add_rms_norm_op = DispatchedOp(
    "add_rms_norm",
    cpp=(add_rms_norm_cpp, usable),
    triton=(add_rms_norm_triton, floats_on_gpu_with_triton),
    reference=add_rms_norm_reference,
)


def rms_norm(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0) -> paddle.Tensor:
    """Normalize the last axis of `x` [..., D] and scale it by `offset + weight_D`."""
    return rms_norm_op.choose(x)(x, weight_D, epsilon, offset)


def add_rms_norm(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return `x + addend` and the normalized sum, both [..., D]: a residual addition followed by a norm."""
    return add_rms_norm_op.choose(x)(x, addend, weight_D, epsilon, offset)
