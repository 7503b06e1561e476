"""Case of benchmarks/triton_ops.py: an op on PyTorch tensors, in this project's Triton kernels and in other packages.

A new op is one function that returns its `Case`, and an `Entry` in the `OPS` of a module triton_cases_<area>.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

BF16, F32 = torch.bfloat16, torch.float32
PROGRAMS = ("ours", "eager", "compiled", "peer")
Op = Callable[..., Any]


class Peer(NamedTuple):
    """Op of another package, which is imported when the op is created."""

    package: str
    make: Callable[[], Op]


@dataclass
class Case:
    """One op at one shape.

    Attributes:
        inputs: tensors of the op; gradients are computed for floating-point tensors with `requires_grad`.
        ours: the op with our kernels.
        formula: the op in plain PyTorch, with the dtypes that transformers uses.
        peer: the op of another package; None if there is none.
        forward_bytes, backward_bytes: bytes that a pass must read and write; 0 for an op bound by its matmuls.
        operations: number of multiplications and additions of the large matmuls in both passes.
        forward_operations: number of multiplications and additions of the large matmuls in the forward pass.
        programs: programs that can run the op.
        compilable: op that is compiled; None: the formula.
    """

    inputs: list[torch.Tensor]
    ours: Op
    formula: Op
    peer: Peer | None = None
    forward_bytes: int = 0
    backward_bytes: int = 0
    operations: int = 0
    forward_operations: int = 0
    programs: Sequence[str] = PROGRAMS
    compilable: Op | None = None


class Entry(NamedTuple):
    """An op of the benchmark.

    Attributes:
        make: function of dtype, device and sizes that returns the case.
        shapes: dtype and sizes of the measured shapes, by name: "liger" is published by Liger-Kernel, "8b" has
            8192 positions and the sizes of Llama 3 8B.
        checks: sizes of the checked shapes.
        dtypes: dtypes of the checks.
    """

    make: Callable[..., Case]
    shapes: dict[str, tuple[Any, ...]]
    checks: Sequence[tuple[Any, ...]]
    dtypes: Sequence[torch.dtype] = (F32, torch.float16, BF16)


def leaf(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a random tensor that needs a gradient."""
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def num_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
