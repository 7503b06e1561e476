"""Soft-cap of attention scores and logits (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

import paddle


def soft_cap(x: paddle.Tensor, softcap: float | None) -> paddle.Tensor:
    """Return `softcap * tanh(x / softcap)`, or `x` itself if `softcap` is None."""
    return x if softcap is None else (x / softcap).tanh() * softcap
