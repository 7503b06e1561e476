"""Gated activations of feed-forward layers: SwiGLU, GeGLU and the clamped SwiGLU of gpt-oss.

    SwiGLU      silu(gate) * up                             Shazeer 2020, arXiv:2002.05202
    GeGLU       gelu(gate) * up                             same paper; tanh approximation of gelu, arXiv:1606.08415
    clamped     g sigmoid(alpha g) (u + 1)                  gpt-oss (OpenAI 2025, arXiv:2508.10925)

    silu(x) = x sigmoid(x)      gelu(x) = x / 2 (1 + tanh(v)),    v = sqrt(2 / pi) (x + 0.044715 x^3)
    g = min(gate, limit)        u = clip(up, -limit, limit)

| backend | file | notes |
| --- | --- | --- |
| cpp | cpp.py | C++ |
| plain_cpu | plain_cpu.py | plain Paddle, optimized for the CPU |
| triton | triton.py | one pass forward and one backward, in float32; gradients may overwrite the inputs |
| recomputed | reference.py | plain Paddle; only the inputs are saved for the backward pass |
| reference | reference.py | plain Paddle with Paddle's automatic gradients |

With `reuse_inputs` the backward pass may overwrite `gate` and `up` with their gradients. The caller must not use `gate`
and `up` after the call, and a second backward pass raises an error. Backends may ignore `reuse_inputs`.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, anywhere, on_cpu_in_fp32
from paddlenlp_ext.ops.gates.cpp import geglu_cpp, swiglu_cpp
from paddlenlp_ext.ops.gates.plain_cpu import swiglu_plain_cpu
from paddlenlp_ext.ops.gates.reference import (
    clamped_swiglu_recomputed,
    clamped_swiglu_reference,
    geglu_recomputed,
    geglu_reference,
    swiglu_reference,
)
from paddlenlp_ext.ops.gates.triton import clamped_swiglu_triton, geglu_triton, swiglu_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

swiglu_op = DispatchedOp(
    "swiglu",
    cpp=(swiglu_cpp, usable),
    plain_cpu=(swiglu_plain_cpu, on_cpu_in_fp32),
    triton=(swiglu_triton, floats_on_gpu_with_triton),
    reference=swiglu_reference,
)
geglu_op = DispatchedOp(
    "geglu",
    cpp=(geglu_cpp, usable),
    triton=(geglu_triton, floats_on_gpu_with_triton),
    recomputed=(geglu_recomputed, anywhere),
    reference=geglu_reference,
)
clamped_swiglu_op = DispatchedOp(
    "clamped_swiglu",
    triton=(clamped_swiglu_triton, floats_on_gpu_with_triton),
    recomputed=(clamped_swiglu_recomputed, anywhere),
    reference=clamped_swiglu_reference,
)


def swiglu(gate: paddle.Tensor, up: paddle.Tensor, *, reuse_inputs: bool = False) -> paddle.Tensor:
    """Return SwiGLU, `silu(gate) * up`; both tensors have the same shape."""
    return swiglu_op.choose(gate)(gate, up, reuse_inputs)


def geglu(gate: paddle.Tensor, up: paddle.Tensor, *, reuse_inputs: bool = False) -> paddle.Tensor:
    """Return GeGLU, `gelu(gate) * up`; both tensors have the same shape."""
    return geglu_op.choose(gate)(gate, up, reuse_inputs)


def clamped_swiglu(
    gate: paddle.Tensor, up: paddle.Tensor, alpha: float, limit: float, *, reuse_inputs: bool = False
) -> paddle.Tensor:
    """Return the clamped SwiGLU of gpt-oss; both tensors have the same shape."""
    return clamped_swiglu_op.choose(gate)(gate, up, alpha, limit, reuse_inputs)
