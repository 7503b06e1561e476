"""Cases of benchmarks/triton_ops.py: norms, rotations and gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.triton_cases import BF16, F32, Case, Entry, Op, Peer, leaf, num_bytes
from benchmarks.triton_torch import Gate, NormRope, RmsNorm, Rope

EPSILON = 1e-6


def norm_formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm as transformers computes it: in float32, scaled in the dtype of x."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def rms_norm(dtype: torch.dtype, device: str, rows: int, size: int) -> Case:
    """Return the case of an RMS norm with a trained weight."""
    x, weight = leaf(rows, size, dtype=dtype, device=device), leaf(size, dtype=dtype, device=device)

    def liger() -> Op:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPSILON)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return RmsNorm.apply(x, weight, EPSILON)

    return Case([x, weight], ours, norm_formula, Peer("liger_kernel", liger), num_bytes(x, x), num_bytes(x, x, x))


def add_rms_norm(dtype: torch.dtype, device: str, rows: int, size: int) -> Case:
    """Return the case of a residual addition followed by a norm."""
    x, addend = (leaf(rows, size, dtype=dtype, device=device) for _ in range(2))
    weight = leaf(size, dtype=dtype, device=device)

    def formula(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + addend
        return norm_formula(total, weight), total

    def liger() -> Op:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, weight, addend: LigerFusedAddRMSNormFunction.apply(x, addend, weight, EPSILON)

    def ours(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return RmsNorm.apply(x, weight, EPSILON, addend)

    moved = num_bytes(x, x, x, x)
    return Case([x, weight, addend], ours, formula, Peer("liger_kernel", liger), moved, moved)


def rope_formula(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated queries and keys as transformers computes them, in their dtype."""
    cos, sin = cos.to(q.dtype).unsqueeze(2), sin.to(q.dtype).unsqueeze(2)

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return turn(q), turn(k)


def _heads_and_tables(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return queries, keys, cos and sin of random angles for [batch, length, query heads, key heads, channels]."""
    batch, length, num_q, num_k, size = shape
    angles = torch.rand(batch, length, size // 2, device=device).repeat(1, 1, 2) * 6
    q, k = (leaf(batch, length, count, size, dtype=dtype, device=device) for count in (num_q, num_k))
    return [q, k, angles.cos(), angles.sin()]


def rope(dtype: torch.dtype, device: str, *shape: int) -> Case:
    """Return the case of a rotation of queries and keys."""
    q, k, cos, sin = _heads_and_tables(dtype, device, shape)

    def liger() -> Op:
        from liger_kernel.ops.rope import LigerRopeFunction

        def run(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            turned = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))
            return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

        return run

    moved = num_bytes(q, q, k, k)
    return Case([q, k, cos, sin], Rope.apply, rope_formula, Peer("liger_kernel", liger), moved, moved)


def norm_rope(dtype: torch.dtype, device: str, *shape: int) -> Case:
    """Return the case of head norms with trained weights, followed by a rotation."""
    q, k, cos, sin = _heads_and_tables(dtype, device, shape)
    weights = [leaf(shape[-1], dtype=dtype, device=device) for _ in range(2)]

    def formula(
        q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_formula(norm_formula(q, q_weight), norm_formula(k, k_weight), *tables)

    def ours(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return NormRope.apply(*tensors, EPSILON)

    return Case([q, k, *weights, cos, sin], ours, formula, None, num_bytes(q, q, k, k), num_bytes(q, k) * 3)


def swiglu(dtype: torch.dtype, device: str, rows: int, features: int) -> Case:
    """Return the case of SwiGLU."""

    def liger() -> Op:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply

    return _gate(dtype, device, rows, features, "silu", lambda gate, up: F.silu(gate) * up, liger)


def geglu(dtype: torch.dtype, device: str, rows: int, features: int) -> Case:
    """Return the case of GeGLU."""

    def liger() -> Op:
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return LigerGELUMulFunction.apply

    def formula(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.gelu(gate, approximate="tanh") * up

    return _gate(dtype, device, rows, features, "gelu", formula, liger)


def _gate(
    dtype: torch.dtype,
    device: str,
    rows: int,
    features: int,
    activation: str,
    formula: Op,
    liger: Callable[[], Op],
) -> Case:
    gate, up = (leaf(rows, features, dtype=dtype, device=device) for _ in range(2))

    def ours(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return Gate.apply(gate, up, activation)

    return Case([gate, up], ours, formula, Peer("liger_kernel", liger), num_bytes(gate) * 3, num_bytes(gate) * 5)


GATE_SHAPES = {"liger": (BF16, 8192, 32768), "8b": (BF16, 8192, 14336)}
OPS = {
    "rms_norm": Entry(rms_norm, {"liger": (BF16, 2048, 32768), "8b": (BF16, 8192, 4096)}, [(37, 100)]),
    "add_rms_norm": Entry(add_rms_norm, {"liger": (F32, 2048, 16384), "8b": (BF16, 8192, 4096)}, [(37, 100)]),
    "rope": Entry(rope, {"liger": (BF16, 1, 16384, 32, 8, 256), "8b": (BF16, 2, 4096, 32, 8, 128)}, [(2, 5, 5, 1, 20)]),
    "norm_rope": Entry(norm_rope, {"8b": (BF16, 2, 4096, 32, 8, 128)}, [(2, 5, 5, 1, 20)]),
    "swiglu": Entry(swiglu, GATE_SHAPES, [(19, 101)]),
    "geglu": Entry(geglu, GATE_SHAPES, [(19, 101)]),
}
