"""Speed and memory of the Triton kernels of the lm_head's loss, LoRA linears and AdamW on a GPU, beside PyTorch's.

Uses PyTorch's tensors. Needs `torch` and `triton` (requirements-peers.txt with a CUDA build of torch), but not Paddle;
measures `liger_kernel` and `bitsandbytes` if they are installed. Prints one JSON line per case and program:

    python -m benchmarks.triton_losses
    python -m benchmarks.triton_losses --cases loss_frozen lora_16
    TRITON_INTERPRET=1 python -m benchmarks.triton_losses --check        on a CPU: small, no times

| case | |
| --- | --- |
| loss, loss_frozen | lm_head [128256, 4096] and loss of 8192 positions, forward and backward; trained or frozen |
| lora_16, lora_32 | LoRA linear 4096 -> 14336 of 8192 positions, forward and backward, by rank |
| adamw, adamw_8bit | one step over the factors of LoRA r 16 on all linear layers of an 8B model |

| program | |
| --- | --- |
| ours | the kernels of paddlenlp_ext/ops with the launches of the Triton backends, around PyTorch's matmuls |
| eager, compiled | the formula in PyTorch; the same through torch.compile |
| peer | Liger-Kernel's loss, PyTorch's fused AdamW, bitsandbytes' 8-bit AdamW |

Times are medians with the L2 cache flushed before each run. `tflops` counts the large matrix products, `gb_per_s` the
weights, gradients and moments that a step must read and write. `matmul_tflops` and `copy_gb_per_s` are those of a
matmul and of a copy on the same card. `peak_mb` is what a run allocates.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton

from benchmarks.measure import report

OPS = Path(__file__).parents[1] / "paddlenlp_ext" / "ops"
CHUNK = 2048
"""Positions per chunk for a vocabulary of 128256 in bf16 (ops/linear_cross_entropy/triton.py)."""
PROGRAMS = ("ours", "eager", "compiled", "peer")
SCALING, RATE, DECAY, BETAS, EPSILON = 2.0, 1e-4, 0.01, (0.9, 0.999), 1e-8
OPTIONS: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
LAYERS = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
"""Inputs and outputs of the linear layers of a decoder layer of Llama 3 8B, which has 32."""


def load(path: str) -> ModuleType:
    """Return a module of an op; its package would import Paddle."""
    name = "benchmarks.of_" + path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, OPS / path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOSS, LORA = load("linear_cross_entropy/triton_kernels.py"), load("lora_linear/triton_kernels.py")
ADAMW, TABLES, CODEBOOKS = load("adamw/triton_kernels.py"), load("adamw/tables.py"), load("quantized/codebooks.py")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on PyTorch's current stream."""
    kernel[grid](*arguments, **constants)


# -- loss -------------------------------------------------------------------------------------------------------------
class Loss:
    """Hidden states, weight of the lm_head and targets; each program returns loss and gradients."""

    def __init__(
        self, positions: int, size: int, vocabulary: int, trains: bool, dtype: torch.dtype, device: str
    ) -> None:
        self.hidden = torch.randn(positions, size, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, size, device=device) / size**0.5
        self.weight = weight.to(dtype).requires_grad_(trains)
        self.targets = torch.randint(0, vocabulary, (positions,), device=device)
        self.inputs = [self.hidden, self.weight] if trains else [self.hidden]
        self.operations = (6 if trains else 4) * positions * size * vocabulary

    @torch.no_grad()
    def ours(self, chunk: int = CHUNK) -> list[torch.Tensor]:
        """Compute both gradients in the forward pass, chunk by chunk."""
        weight, losses, rows, total = self.weight.detach(), [], [], None
        for first in range(0, len(self.hidden), chunk):
            hidden, targets = self.hidden.detach()[first : first + chunk], self.targets[first : first + chunk]
            logits = hidden @ weight.T
            losses.append(torch.empty(len(hidden), device=hidden.device))
            correct = torch.empty(len(hidden), dtype=torch.int32, device=hidden.device)
            LOSS.launch_cross_entropy(launch, logits, targets, losses[-1], correct, True, None)
            rows.append(logits @ weight)
            if self.weight.requires_grad:
                part = (logits.T @ hidden).float()
                total = part if total is None else total.add_(part)
        gradients = [] if total is None else [total.to(weight.dtype)]
        return [torch.cat(losses).sum(), torch.cat(rows), *gradients]

    def formula(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the loss from all logits, in float32 after the matmul or in `dtype`."""
        hidden, weight = (each.to(dtype or each.dtype) for each in (self.hidden, self.weight))
        loss = F.cross_entropy((hidden @ weight.T).to(dtype or torch.float32), self.targets, reduction="sum")
        return [loss.detach(), *torch.autograd.grad(loss, self.inputs)]

    def peer(self) -> list[torch.Tensor]:
        """Return the loss of Liger-Kernel."""
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        found = LigerFusedLinearCrossEntropyFunction.apply(
            self.hidden, self.weight, self.targets, None, None, -100, 0.0, 0.0, "sum"
        )
        loss = found[0] if isinstance(found, tuple) else found
        return [loss.detach(), *torch.autograd.grad(loss, self.inputs)]


# -- LoRA -------------------------------------------------------------------------------------------------------------
class LoRA:
    """Frozen linear layer with a low-rank update; each program returns y and the gradients of x, A and B."""

    def __init__(self, positions: int, in_: int, out: int, rank: int, dtype: torch.dtype, device: str) -> None:
        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype)

        self.weight, self.gradient = random(out, in_), random(positions, out)
        self.inputs = [random(positions, in_), random(rank, in_), random(out, rank)]
        for each in self.inputs:
            each.requires_grad_()
        self.operations = 4 * positions * in_ * out

    @torch.no_grad()
    def ours(self) -> list[torch.Tensor]:
        """Compute forward and backward pass as `ops.lora_linear.triton` does."""
        (x, a, b), rank = (each.detach() for each in self.inputs), self.inputs[1].shape[0]
        y, inner = x @ self.weight.T, x @ a.T
        LORA.launch_add_low_rank(launch, y, inner, b, SCALING, (1, rank))

        def empty(shape: list[int]) -> torch.Tensor:
            return torch.empty(shape, device=x.device)

        row_parts, column_parts = LORA.launch_low_rank_gradients(launch, empty, self.gradient, inner, b)
        v, b_gradient = row_parts.sum(0).mul_(SCALING).to(x.dtype), column_parts.sum(0).mul_(SCALING).to(x.dtype)
        x_gradient = self.gradient @ self.weight
        LORA.launch_add_low_rank(launch, x_gradient, v, a, 1.0, (a.shape[1], 1))
        return [y, x_gradient, v.T @ x, b_gradient]

    def formula(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Compute the formula of PEFT's layer."""
        x, a, b = (each.to(dtype or each.dtype) for each in self.inputs)
        y = F.linear(x, self.weight.to(x.dtype)) + F.linear(F.linear(x, a), b) * SCALING
        return [y.detach(), *torch.autograd.grad(y, self.inputs, self.gradient.to(y.dtype))]


# -- AdamW ------------------------------------------------------------------------------------------------------------
class AdamW:
    """Factors of an adapter in fp32 with their gradients and moments; each program makes one step."""

    def __init__(self, shapes: list[tuple[int, ...]], in_8_bits: bool, device: str) -> None:
        self.in_8_bits, self.device = in_8_bits, device
        self.parameters = [torch.randn(*shape, device=device) for shape in shapes]
        self.gradients = [torch.randn_like(each) for each in self.parameters]
        total = sum(each.numel() for each in self.parameters)
        self.bytes = total * (12 + (4 if in_8_bits else 16))
        if in_8_bits:
            blocks = [-(-each.numel() // 256) for each in self.parameters]
            self.moments = [
                [torch.full((count, 256), zero, dtype=torch.uint8, device=device) for count in blocks]
                for zero in (int(np.flatnonzero(CODEBOOKS.dynamic_levels(signed) == 0)[0]) for signed in (True, False))
            ]
            self.scales = [[torch.zeros(count, device=device) for count in blocks] for _ in range(2)]
            self.quantizers = tuple(each for signed in (True, False) for each in self._quantizer(signed))
        else:
            self.moments = [[torch.zeros_like(each) for each in self.parameters] for _ in range(2)]
        self.optimizer: Any = None

    def _quantizer(self, signed: bool) -> list[torch.Tensor]:
        """Return levels, borders, and the code below each group of numbers with equal upper 18 bits."""
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

    def ours(self) -> list[torch.Tensor]:
        """Build the tables and launch the kernel, as `ops.adamw.triton` does in each step."""
        tensors = zip(self.parameters, self.gradients, *self.moments, strict=True)
        rows = [TABLES.TableRow(*(x.data_ptr() for x in each), 0, each[0].numel()) for each in tensors]
        if self.in_8_bits:
            rows = [
                row._replace(scales1=one.data_ptr(), scales2=two.data_ptr())
                for row, one, two in zip(rows, *self.scales, strict=True)
            ]
        blocks = TABLES.block_map([row.size for row in rows], ADAMW.SPAN)
        corrections = [1 - beta for beta in BETAS]
        numbers = [1 - RATE * DECAY, RATE, 1 / corrections[0], 1 / corrections[1]]
        if not self.in_8_bits:
            root = corrections[1] ** 0.5
            numbers[1:] = [RATE * root / corrections[0], EPSILON * root, 0.0]
        tables = TABLES.table_of(rows), np.array([numbers] * len(rows), np.float32), blocks
        kinds = {"WEIGHT": "float32", "GRADIENT": "float32", "ROUNDING": "none"}
        kinds["ALIGNMENT"] = min(row.alignment for row in rows)
        on_device = [torch.from_numpy(each).to(self.device) for each in tables]
        betas = BETAS[0], 1 - BETAS[0], BETAS[1], 1 - BETAS[1]
        if self.in_8_bits:
            ADAMW.launch_adamw_8bit(launch, *on_device, self.quantizers, betas, EPSILON, kinds)
        else:
            ADAMW.launch_adamw(launch, *on_device, betas, kinds)
        return self.parameters

    def formula(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Make a step of PyTorch's AdamW, tensor by tensor; in `dtype` on copies."""
        if dtype is not None:
            copies = [each.to(dtype) for each in self.parameters]
            return self._step(torch.optim.AdamW(self._with_gradients(copies, dtype), **OPTIONS, foreach=False))
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self._with_gradients(self.parameters), **OPTIONS, foreach=False)
        return self._step(self.optimizer)

    def peer(self) -> list[torch.Tensor]:
        """Make a step of PyTorch's fused AdamW, or of the 8-bit one of bitsandbytes."""
        if self.optimizer is None:
            parameters = self._with_gradients(self.parameters)
            if self.in_8_bits:
                from bitsandbytes.optim import AdamW8bit

                self.optimizer = AdamW8bit(parameters, **OPTIONS)
            else:
                self.optimizer = torch.optim.AdamW(parameters, **OPTIONS, fused=True)
        return self._step(self.optimizer)

    def _with_gradients(self, parameters: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient.to(dtype or gradient.dtype)
        return parameters

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        optimizer.step()
        return optimizer.param_groups[0]["params"]


def lora_shapes(rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of the factors of all layers."""
    return [shape for _ in range(32) for in_, out in LAYERS for shape in ((rank, in_), (out, rank))]


BF16 = torch.bfloat16
CASES: dict[str, tuple[Callable[[], Any], Callable[[torch.dtype, str], Any]]] = {
    # case -> its maker, and that of its check
    "loss_frozen": (
        lambda: Loss(8192, 4096, 128256, False, BF16, "cuda"),
        lambda dtype, device: Loss(37, 40, 301, False, dtype, device),
    ),
    "loss": (
        lambda: Loss(8192, 4096, 128256, True, BF16, "cuda"),
        lambda dtype, device: Loss(37, 40, 301, True, dtype, device),
    ),
    "lora_16": (
        lambda: LoRA(8192, 4096, 14336, 16, BF16, "cuda"),
        lambda dtype, device: LoRA(70, 40, 90, 5, dtype, device),
    ),
    "lora_32": (
        lambda: LoRA(8192, 4096, 14336, 32, BF16, "cuda"),
        lambda dtype, device: LoRA(70, 40, 90, 32, dtype, device),
    ),
    "adamw": (
        lambda: AdamW(lora_shapes(16), False, "cuda"),
        lambda _, device: AdamW([(3, 5), (16, 40), (1,)], False, device),
    ),
    "adamw_8bit": (
        lambda: AdamW(lora_shapes(16), True, "cuda"),
        lambda _, device: AdamW([(3, 5), (16, 40), (1,)], True, device),
    ),
}


def check(device: str, names: list[str]) -> None:
    """Compare the kernels with the formulas in float64 at small shapes."""
    for name in names:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3), (BF16, 1.6e-2)):
            if device == "cpu" and dtype == BF16:
                continue  # the interpreter truncates, a GPU rounds
            case = CASES[name][1](dtype, device)
            exact = [each.clone() for each in case.formula(torch.float64)]
            for one, other in zip(case.ours(), exact, strict=True):
                assert (one.double() - other).norm() <= tolerance * other.norm(), (name, dtype)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds, with the L2 cache flushed before each call."""
    return triton.testing.do_bench(run, return_mode="median")


def card() -> dict[str, object]:
    """Return the name of the GPU, and the speeds of a copy of 2 GB and of a matmul of the loss's size."""
    source = torch.empty(1 << 30, dtype=BF16, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e6
    x, weight = (torch.randn(rows, 4096, device="cuda").to(BF16) for rows in (8192, 32768))
    matmul = 2 * 8192 * 4096 * 32768 / milliseconds(lambda: x @ weight.T) / 1e9
    return {"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": round(copy), "matmul_tflops": round(matmul)}


def program_of(case: Any, program: str) -> Callable[[], object] | None:
    """Return the run of a program, or None if it has none or is not installed."""
    if program == "peer":
        package = {Loss: "liger_kernel", AdamW: "bitsandbytes" if getattr(case, "in_8_bits", False) else "torch"}
        name = package.get(type(case))
        return case.peer if name and importlib.util.find_spec(name) else None
    if isinstance(case, AdamW) and case.in_8_bits and program != "ours":
        return None  # PyTorch has no 8-bit AdamW
    if program == "compiled":
        return None if isinstance(case, AdamW) else torch.compile(case.formula, dynamic=False)
    return case.ours if program == "ours" else case.formula


def measure(case: Any, run: Callable[[], object]) -> dict[str, object]:
    """Return time, memory and speed of a run."""
    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    figures: dict[str, object] = {"peak_mb": round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)}
    time = milliseconds(run)
    figures["ms"] = round(time, 4)
    if isinstance(case, AdamW):
        return figures | {"gb_per_s": round(case.bytes / time / 1e6)}
    return figures | {"tflops": round(case.operations / time / 1e9, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the kernels with PyTorch at small shapes")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="cases to run")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="programs to measure")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.check:
        raise SystemExit("times need a GPU; with TRITON_INTERPRET=1 and --check the kernels run on a CPU")
    torch.manual_seed(0)
    check(device, args.cases)
    if args.check:
        print(f"{', '.join(args.cases)}: the kernels agree with PyTorch on the {device}")
        return
    found, packages = card(), [name for name in ("liger_kernel", "bitsandbytes") if importlib.util.find_spec(name)]
    for name in args.cases:
        for program in args.programs:
            case = CASES[name][0]()
            run = program_of(case, program)
            if run is not None:
                figures = {**found, "case": name, "program": program, **measure(case, run)}
                report("triton_losses", figures, "torch", "triton", *packages)
            del case, run
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
