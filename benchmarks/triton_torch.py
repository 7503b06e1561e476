"""Triton kernels of this project as autograd functions of PyTorch, for benchmarks.

The functions allocate, save and overwrite the same tensors as the Triton backends of paddlenlp_ext/ops. The functions
load the kernels from there, and do not need Paddle. All tensors are contiguous, except the heads of a rotation.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums
from tests.common.scripts import bare_packages


def load(path: str) -> ModuleType:
    """Load a module of paddlenlp_ext/ops from its file, because importing its package would import Paddle."""
    file = Path(__file__).parents[1] / "paddlenlp_ext" / "ops" / path
    name = "benchmarks.of_" + path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    with bare_packages("grouped_linear"):  # lora_linear reads one of its kernels
        spec.loader.exec_module(module)
    return module


RMS_NORM, ROPE, GATES, LOSS, LORA, ADAMW = (
    load(f"{op}/kernels.py") for op in ("rms_norm", "rope", "gates", "linear_cross_entropy", "lora_linear", "adamw")
)
TABLES, CODEBOOKS = load("adamw/launch_tables.py"), load("quantized_weight/codebooks.py")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on PyTorch's current stream."""
    kernel[grid](*arguments, **constants)


# -- norms ------------------------------------------------------------------------------------------------------------
class RmsNorm(torch.autograd.Function):
    """RMS norm of x [..., D]; with an addend also the sum of both."""

    @staticmethod
    def forward(ctx, x, weight, epsilon, addend=None):
        out, total = torch.empty_like(x), None if addend is None else torch.empty_like(x)
        RMS_NORM.launch_forward(launch, x, x.shape[-1], weight, out, epsilon, 0.0, addend, total)
        ctx.save_for_backward(x if total is None else total, weight)
        ctx.epsilon = epsilon
        return out if total is None else (out, total)

    @staticmethod
    def backward(ctx, gradient, total_gradient=None):
        x, weight = ctx.saved_tensors
        size, x_gradient, partials, weight_gradient = x.shape[-1], torch.empty_like(x), None, None
        if ctx.needs_input_grad[1]:
            rows = RMS_NORM.num_partials(x)
            partials, weight_gradient = torch.empty(rows, size, device=x.device), torch.empty_like(weight)
        tensors = gradient.contiguous(), x, size, weight, x_gradient
        sum_gradient = None if total_gradient is None else total_gradient.contiguous()
        RMS_NORM.launch_backward(launch, *tensors, ctx.epsilon, 0.0, sum_gradient, partials)
        if partials is not None:
            launch_column_sums(launch, partials, weight_gradient)
        return x_gradient, weight_gradient, None, None if total_gradient is None else x_gradient


# -- rotations --------------------------------------------------------------------------------------------------------
class Rope(torch.autograd.Function):
    """Rotation of queries and keys [B, S, heads, H] by tables [B, S, H]."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin)

    @staticmethod
    def backward(ctx, *gradients):
        return *_turn(*gradients, *ctx.saved_tensors, back=True), None, None


def _turn(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q, k))
    ROPE.launch_rope(launch, heads(q), heads(k), (cos, sin), outs, False, **options)
    return outs


def heads(x: torch.Tensor) -> Any:
    """Return a tensor [B, S, N, H] with the strides of tokens and heads; copy it if tokens are not evenly spaced."""
    if x.stride(-1) != 1 or (x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)):
        x = x.contiguous()
    return ROPE.Heads(x, x.stride(1), x.stride(2))


class NormRope(torch.autograd.Function):
    """RMS norms of the heads of queries and keys, and their rotation."""

    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, epsilon):
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.epsilon = epsilon
        return _turn(q, k, cos, sin, norms=_head_norms(q_weight, k_weight, epsilon))

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
            norms=_head_norms(q_weight, k_weight, ctx.epsilon),
            partials=partials,
        )
        launch_column_sums(launch, partials, results[2], 0, rows[0])
        launch_column_sums(launch, partials, results[3], *rows)
        return *results, None, None, None


def _head_norms(q_weight: torch.Tensor, k_weight: torch.Tensor, epsilon: float) -> SimpleNamespace:
    """Return an object with the attributes of `ops.rope.HeadNorms`."""
    return SimpleNamespace(q_weight=q_weight, k_weight=k_weight, epsilon=epsilon, offset=0.0, after_rotation=False)


# -- gates ------------------------------------------------------------------------------------------------------------
class Gate(torch.autograd.Function):
    """Product of a gate, "silu" or "gelu", and up [..., F]; the gradients overwrite gate and up."""

    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate.detach(), up.detach())
        ctx.activation = activation
        return gated(gate, up, activation)

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        GATES.launch_backward(launch, *map(_rows, (gradient.contiguous(), gate, up, gate, up)), ctx.activation)
        return gate, up, None


def recomputable_gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the product of `Gate`; its attribute `recompute` holds a function and its inputs."""
    out = Gate.apply(gate, up, activation)
    out.recompute = functools.partial(gated, activation=activation), gate.detach(), up.detach()
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the product of a gate and up, without a gradient."""
    out = torch.empty_like(gate)
    GATES.launch_forward(launch, *map(_rows, (gate, up, out)), activation)
    return out


def _rows(x: torch.Tensor) -> Any:
    return GATES.Rows(x, x.stride(-2))


# -- loss -------------------------------------------------------------------------------------------------------------
CHUNK_BYTES = 1 << 29
"""Maximum size of a chunk's logits (ops/linear_cross_entropy/triton.py)."""


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses of hidden states [T, D], a weight [V, D] and targets [T]; `forward` computes both gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk=None):
        losses, rows, total = [], [], None
        chunk = chunk or max(1, CHUNK_BYTES // (len(weight) * weight.element_size() * 256)) * 256
        for first in range(0, len(hidden), chunk):
            own, labels = hidden[first : first + chunk], targets[first : first + chunk]
            logits = own @ weight.T
            losses.append(torch.empty(len(own), device=hidden.device))
            correct = torch.empty(len(own), dtype=torch.int32, device=hidden.device)
            LOSS.launch_cross_entropy(launch, logits, labels, losses[-1], correct, True, None)
            if ctx.needs_input_grad[0]:
                rows.append(logits @ weight)
            if ctx.needs_input_grad[1]:
                part = (logits.T @ own).float()
                total = part if total is None else total.add_(part)
        ctx.gradients = torch.cat(rows) if rows else None, total
        ctx.dtype = weight.dtype
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, gradient):
        (rows, total), ctx.gradients = ctx.gradients, None  # scaled in place, so a second backward pass is impossible
        rows = None if rows is None else rows.mul_(gradient)
        return rows, None if total is None else total.mul_(gradient).to(ctx.dtype), None, None


# -- LoRA -------------------------------------------------------------------------------------------------------------
class Base(Protocol):
    """Frozen linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T [..., O]."""

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return dy W [T, I]."""


class Dense:
    """Frozen linear layer with a weight [O, I]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T [..., O]."""
        return x @ self.weight.T

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return dy W [T, I]."""
        return gradient @ self.weight


class LoraLinear(torch.autograd.Function):
    """Linear layer of x [..., I] with the update s B A: A [K, I] and B [O, K] in any dtype.

    With `recompute`, `sources` are saved instead of x, which is `recompute(*sources)`.
    """

    @staticmethod
    def forward(ctx, x, a, b, base, scaling, recompute=None, *sources):
        y, rank = base.forward(x), len(a)
        inner = x.reshape(-1, x.shape[-1]).to(y.dtype) @ a.to(y.dtype).T
        LORA.launch_add_low_rank(launch, y, inner, b.to(y.dtype), scaling, (1, rank))
        ctx.save_for_backward(a, b, inner, *(sources if recompute else [x]))
        ctx.base, ctx.scaling, ctx.recompute, ctx.shape, ctx.dtype = base, scaling, recompute, x.shape, x.dtype
        return y

    @staticmethod
    def backward(ctx, y_gradient):
        a, b, inner, *sources = ctx.saved_tensors
        x = ctx.recompute(*sources) if ctx.recompute else sources[0]
        gradient = y_gradient.reshape(-1, y_gradient.shape[-1]).contiguous()
        dtype = gradient.dtype

        def empty(shape: list[int]) -> torch.Tensor:
            return torch.empty(shape, device=gradient.device)

        row_parts, column_parts = LORA.launch_low_rank_gradients(launch, empty, gradient, inner, b.to(dtype))
        v = row_parts.sum(0).mul_(ctx.scaling).to(dtype)
        b_gradient = column_parts.sum(0).mul_(ctx.scaling).to(b.dtype)
        a_gradient = (v.T @ x.reshape(-1, x.shape[-1]).to(dtype)).to(a.dtype)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = ctx.base.input_gradient(gradient)
            LORA.launch_add_low_rank(launch, x_gradient, v, a.to(dtype), 1.0, (a.shape[1], 1))
            x_gradient = x_gradient.reshape(ctx.shape).to(ctx.dtype)
        of_sources = [None] * (len(sources) if ctx.recompute else 0)
        return x_gradient, a_gradient, b_gradient, None, None, None, *of_sources


# -- AdamW ------------------------------------------------------------------------------------------------------------
class AdamW:
    """AdamW of fp32 parameters in one launch, with moments in fp32 or in 8 bits."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        in_8_bits: bool = False,
    ) -> None:
        self.parameters, self.in_8_bits, self.steps = list(parameters), in_8_bits, 0
        self.rate, self.betas, self.epsilon, self.decay = lr, betas, eps, weight_decay
        self.device = self.parameters[0].device
        if not in_8_bits:
            self.moments = [[torch.zeros_like(each) for each in self.parameters] for _ in range(2)]
            return
        blocks = [-(-each.numel() // 256) for each in self.parameters]
        self.moments = [
            [torch.full((count, 256), zero, dtype=torch.uint8, device=self.device) for count in blocks]
            for zero in (int(np.flatnonzero(CODEBOOKS.dynamic_levels(signed) == 0)[0]) for signed in (True, False))
        ]
        self.scales = [[torch.zeros(count, device=self.device) for count in blocks] for _ in range(2)]
        self.quantizers = tuple(each for signed in (True, False) for each in self._quantizer(signed))

    def _quantizer(self, signed: bool) -> list[torch.Tensor]:
        """Return levels, borders, and the lowest code of the numbers that share their upper 18 bits."""
        levels = CODEBOOKS.dynamic_levels(signed)
        borders = (levels[:-1] + levels[1:]) / np.float32(2)
        bits = np.arange(1 << 18, dtype=np.uint32) << np.uint32(14)
        ends = bits.view(np.float32), (bits | np.uint32((1 << 14) - 1)).view(np.float32)
        lowest = np.where(np.abs(ends[0]) <= 1, np.minimum(*ends), np.float32(0))
        codes = np.searchsorted(borders, lowest).astype(np.uint8)
        return [
            torch.from_numpy(each.copy()).to(self.device)
            for each in (levels, np.append(borders, np.inf).astype(np.float32), codes)
        ]

    def step(self) -> None:
        """Update the parameters by their `grad`; build the tables in each step, as `ops.adamw.triton` does."""
        self.steps += 1
        gradients = [each.grad.contiguous() for each in self.parameters]
        tensors = zip(self.parameters, gradients, *self.moments, strict=True)
        rows = [TABLES.TableRow(*(x.data_ptr() for x in each), 0, each[0].numel()) for each in tensors]
        if self.in_8_bits:
            rows = [
                row._replace(scales1=one.data_ptr(), scales2=two.data_ptr())
                for row, one, two in zip(rows, *self.scales, strict=True)
            ]
        blocks = TABLES.block_map([row.size for row in rows], ADAMW.SPAN)
        corrections = [1 - beta**self.steps for beta in self.betas]
        numbers = [1 - self.rate * self.decay, self.rate, 1 / corrections[0], 1 / corrections[1]]
        if not self.in_8_bits:
            root = corrections[1] ** 0.5
            numbers[1:] = [self.rate * root / corrections[0], self.epsilon * root, 0.0]
        tables = TABLES.table_of(rows), np.array([numbers] * len(rows), np.float32), blocks
        kinds = {"WEIGHT": "float32", "GRADIENT": "float32", "ROUNDING": "none"}
        kinds["ALIGNMENT"] = min(row.alignment for row in rows)
        on_device = [torch.from_numpy(each).to(self.device) for each in tables]
        betas = self.betas[0], 1 - self.betas[0], self.betas[1], 1 - self.betas[1]
        if self.in_8_bits:
            ADAMW.launch_adamw_8bit(launch, *on_device, self.quantizers, betas, self.epsilon, kinds)
        else:
            ADAMW.launch_adamw(launch, *on_device, betas, kinds)
