"""Cases of benchmarks/triton_ops.py: loss of the lm_head, LoRA linear layers and AdamW."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.triton_cases import BF16, F32, Case, Entry, Op, Peer, leaf
from benchmarks.triton_torch import AdamW, Dense, LinearCrossEntropy, LoraLinear

SCALING = 2.0
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LAYERS = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
"""Inputs and outputs of the linear layers in each of the 32 decoder layers of Llama 3 8B."""
FACTORS = {
    "8b_16": [shape for _ in range(32) for in_, out in LAYERS for shape in ((16, in_), (out, 16))],
    "check": [(3, 5), (16, 40), (1,)],
}
"""Shapes of the tensors that AdamW updates: the factors of LoRA r 16 on all linear layers, and small tensors."""


def loss(trains: bool, dtype: torch.dtype, device: str, positions: int, size: int, vocabulary: int) -> Case:
    """Return the case of an lm_head, trained or frozen, and the sum of the losses of its logits."""
    hidden = leaf(positions, size, dtype=dtype, device=device)
    weight = (torch.randn(vocabulary, size, device=device) / size**0.5).to(dtype).requires_grad_(trains)
    targets = torch.randint(0, vocabulary, (positions,), device=device)

    def formula(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = hidden @ weight.T
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets, reduction="sum")

    def liger() -> Op:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def run(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            found = LigerFusedLinearCrossEntropyFunction.apply(
                hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum"
            )
            return found[0] if isinstance(found, tuple) else found

        return run

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return LinearCrossEntropy.apply(hidden, weight, targets)

    operations = (6 if trains else 4) * positions * size * vocabulary
    peer = Peer("liger_kernel", liger)
    return Case([hidden, weight], ours, formula, peer, operations=operations)


def lora_linear(dtype: torch.dtype, device: str, positions: int, in_: int, out: int, rank: int) -> Case:
    """Return the case of a frozen linear layer with a low-rank update, with the formula of PEFT's layer."""

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype)

    weight, inputs = random(out, in_), [random(positions, in_), random(rank, in_), random(out, rank)]
    for each in inputs:
        each.requires_grad_()
    base = Dense(weight)

    def formula(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.to(x.dtype)) + F.linear(F.linear(x, a), b) * SCALING

    def ours(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return LoraLinear.apply(x, a, b, base, SCALING)

    return Case(inputs, ours, formula, operations=4 * positions * in_ * out)


def adamw(in_8_bits: bool, dtype: torch.dtype, device: str, factors: str) -> Case:
    """Return the case of a step of AdamW in fp32; `inputs` are the parameters and their gradients."""
    parameters = [torch.randn(*shape, device=device) for shape in FACTORS[factors]]
    gradients = [torch.randn_like(each) for each in parameters]

    def bitsandbytes(tensors: Iterable[torch.Tensor]) -> Any:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(tensors, **OPTIONS)

    def fused(tensors: Iterable[torch.Tensor]) -> Any:
        return torch.optim.AdamW(tensors, **OPTIONS, fused=True)

    package, peer = ("bitsandbytes", bitsandbytes) if in_8_bits else ("torch", fused)
    return Case(
        [*parameters, *gradients],
        _steps_of(functools.partial(AdamW, **OPTIONS, in_8_bits=in_8_bits)),
        _steps_of(functools.partial(torch.optim.AdamW, **OPTIONS, foreach=False)),
        Peer(package, lambda: _steps_of(peer)),
        forward_bytes=sum(each.numel() for each in parameters) * (12 + (4 if in_8_bits else 16)),
        programs=("ours", "peer") if in_8_bits else ("ours", "eager", "peer"),  # PyTorch has no 8-bit AdamW
    )


def _steps_of(make: Callable[[Iterable[torch.Tensor]], Any]) -> Op:
    """Return an op that runs an optimizer step; calls with the same parameters share the optimizer's state."""
    parameters: list[torch.Tensor] = []
    optimizer: Any = None

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal parameters, optimizer
        count = len(tensors) // 2
        if optimizer is None or parameters[0] is not tensors[0]:
            parameters = [*tensors[:count]]
            optimizer = make(parameters)
        for parameter, gradient in zip(parameters, tensors[count:], strict=True):
            parameter.grad = gradient
        optimizer.step()
        return parameters

    return step


LOSS_SHAPES = {"8b": (BF16, 8192, 4096, 128256)}
OPS = {
    "loss_frozen": Entry(functools.partial(loss, False), LOSS_SHAPES, [(37, 40, 301)]),
    "loss": Entry(functools.partial(loss, True), LOSS_SHAPES, [(37, 40, 301)]),
    "lora_linear": Entry(
        lora_linear,
        {"8b_16": (BF16, 8192, 4096, 14336, 16), "8b_32": (BF16, 8192, 4096, 14336, 32)},
        [(70, 40, 90, 5), (70, 40, 90, 32)],
    ),
    "adamw": Entry(functools.partial(adamw, False), {"8b_16": (F32, "8b_16")}, [("check",)]),
    "adamw_8bit": Entry(functools.partial(adamw, True), {"8b_16": (F32, "8b_16")}, [("check",)]),
}
