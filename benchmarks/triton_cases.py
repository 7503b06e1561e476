"""Cases of benchmarks/triton_ops.py: ops on PyTorch's tensors, by our Triton kernels, in PyTorch, and in Liger-Kernel.

A new op is one function that returns its `Case`, and a line in `OPS`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from paddlenlp_ext.ops.triton_column_sums import launch_column_sums

EPSILON = 1e-6
Op = Callable[..., Any]


def kernels(op: str) -> ModuleType:
    """Return the kernels of an op; its package would import Paddle."""
    path = Path(__file__).parents[1] / "paddlenlp_ext" / "ops" / op / "triton_kernels.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks.kernels_of_{op}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RMS_NORM, ROPE, GATES = kernels("rms_norm"), kernels("rope"), kernels("gates")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on PyTorch's current stream."""
    kernel[grid](*arguments, **constants)


@dataclass
class Case:
    """One op at one shape.

    Attributes:
        inputs: tensors of the op; those of floating type with `requires_grad` get gradients.
        ours, formula: the op; the formula computes in the dtype of its inputs where transformers does.
        liger: the op of Liger-Kernel, imported when it is called first; None if it has none.
        forward_bytes, backward_bytes: bytes that a pass must read and write.
    """

    inputs: list[torch.Tensor]
    ours: Op
    formula: Op
    liger: Callable[[], Op] | None
    forward_bytes: int
    backward_bytes: int


def leaf(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a random tensor that needs a gradient."""
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def num_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, addend):
        out, total = torch.empty_like(x), None if addend is None else torch.empty_like(x)
        RMS_NORM.launch_forward(launch, x, x.shape[-1], weight, out, EPSILON, 0.0, addend, total)
        ctx.save_for_backward(x if total is None else total, weight)
        return out if total is None else (out, total)

    @staticmethod
    def backward(ctx, gradient, total_gradient=None):
        x, weight = ctx.saved_tensors
        x_gradient, weight_gradient = torch.empty_like(x), torch.empty_like(weight)
        rows = RMS_NORM.num_partials(x.numel() // x.shape[-1], x.shape[-1])
        partials = torch.empty(rows, x.shape[-1], device=x.device)
        tensors = gradient, x, x.shape[-1], weight, x_gradient
        RMS_NORM.launch_backward(launch, *tensors, EPSILON, 0.0, total_gradient, partials)
        launch_column_sums(launch, partials, weight_gradient)
        return x_gradient, weight_gradient, None if total_gradient is None else x_gradient


def norm_formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm as transformers computes it: in float32, scaled in the dtype of x."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def rms_norm(dtype: torch.dtype, device: str, rows: int, size: int) -> Case:
    """Return the case of an RMS norm whose weight trains."""
    x, weight = leaf(rows, size, dtype=dtype, device=device), leaf(size, dtype=dtype, device=device)

    def liger() -> Op:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPSILON)

    ours = lambda x, weight: _RmsNorm.apply(x, weight, None)  # noqa: E731
    return Case([x, weight], ours, norm_formula, liger, num_bytes(x, x), num_bytes(x, x, x))


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

    moved = num_bytes(x, x, x, x)
    return Case([x, weight, addend], _RmsNorm.apply, formula, liger, moved, moved)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin)

    @staticmethod
    def backward(ctx, q_gradient, k_gradient):
        return *_turn(q_gradient.contiguous(), k_gradient.contiguous(), *ctx.saved_tensors, back=True), None, None


def _turn(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = torch.empty_like(q), torch.empty_like(k)
    ROPE.launch_rope(launch, heads(q), heads(k), (cos, sin), outs, False, **options)
    return outs


def heads(x: torch.Tensor) -> Any:
    """Return a contiguous tensor [B, S, N, H] with its strides."""
    return ROPE.Heads(x, x.stride(1), x.stride(2))


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin):
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        return _turn(q, k, cos, sin, norms=_head_norms(q_weight, k_weight))

    @staticmethod
    def backward(ctx, *gradients):
        q, k, q_weight, k_weight, *tables = ctx.saved_tensors
        results, rows = (
            [torch.empty_like(each) for each in (q, k, q_weight, k_weight)],
            ROPE.partial_rows(q, k, tables[0]),
        )
        partials = torch.empty(sum(rows), q.shape[-1], device=q.device)
        ROPE.launch_norm_rope_backward(
            *(launch, [each.contiguous() for each in gradients], heads(q), heads(k), tables, results[:2], False),
            norms=_head_norms(q_weight, k_weight),
            partials=partials,
        )
        launch_column_sums(launch, partials, results[2], 0, rows[0])
        launch_column_sums(launch, partials, results[3], *rows)
        return *results, None, None


def _head_norms(q_weight: torch.Tensor, k_weight: torch.Tensor) -> SimpleNamespace:
    """Return what the kernels read of `ops.rope.HeadNorms`."""
    return SimpleNamespace(q_weight=q_weight, k_weight=k_weight, epsilon=EPSILON, offset=0.0, after_rotation=False)


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
    return Case([q, k, cos, sin], _Rope.apply, rope_formula, liger, moved, moved)


def norm_rope(dtype: torch.dtype, device: str, *shape: int) -> Case:
    """Return the case of norms of heads, whose weights train, and a rotation."""
    q, k, cos, sin = _heads_and_tables(dtype, device, shape)
    weights = [leaf(shape[-1], dtype=dtype, device=device) for _ in range(2)]

    def formula(
        q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_formula(norm_formula(q, q_weight), norm_formula(k, k_weight), *tables)

    return Case([q, k, *weights, cos, sin], _NormRope.apply, formula, None, num_bytes(q, q, k, k), num_bytes(q, k) * 3)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate.detach(), up.detach())
        ctx.activation, out = activation, torch.empty_like(gate)
        GATES.launch_forward(launch, *map(_rows, (gate, up, out)), activation)
        return out

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        GATES.launch_backward(launch, *map(_rows, (gradient, gate, up, gate, up)), ctx.activation)
        return gate, up, None  # written over the inputs, as in the model and in Liger-Kernel


def _rows(x: torch.Tensor) -> Any:
    return GATES.Rows(x, x.stride(-2))


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
    ours = lambda gate, up: _Gate.apply(gate, up, activation)  # noqa: E731
    return Case([gate, up], ours, formula, liger, num_bytes(gate) * 3, num_bytes(gate) * 5)


BF16 = torch.bfloat16
OPS: dict[str, tuple[Callable[..., Case], dict[str, tuple[Any, ...]], tuple[int, ...]]] = {
    # op: case, name of a shape -> dtype and sizes, sizes of the check
    "rms_norm": (rms_norm, {"liger": (BF16, 2048, 32768), "8b": (BF16, 8192, 4096)}, (37, 100)),
    "add_rms_norm": (add_rms_norm, {"liger": (torch.float32, 2048, 16384), "8b": (BF16, 8192, 4096)}, (37, 100)),
    "rope": (rope, {"liger": (BF16, 1, 16384, 32, 8, 256), "8b": (BF16, 2, 4096, 32, 8, 128)}, (2, 5, 5, 1, 20)),
    "norm_rope": (norm_rope, {"8b": (BF16, 2, 4096, 32, 8, 128)}, (2, 5, 5, 1, 20)),
    "swiglu": (swiglu, {"liger": (BF16, 8192, 32768), "8b": (BF16, 8192, 14336)}, (19, 101)),
    "geglu": (geglu, {"liger": (BF16, 8192, 32768), "8b": (BF16, 8192, 14336)}, (19, 101)),
}
