"""The gate of a SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F


def swiglu_reference(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """`silu(gate) * up`, elementwise."""
    return F.silu(gate) * up


def swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """`silu(gate) * up` for two tensors of one shape."""
    return swiglu_reference(gate, up)
