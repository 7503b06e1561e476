"""Linear layers in decoding, with few positions: after a norm, packed, or with LoRA (triton_ops.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.triton_cases import BF16, Case, Entry, Op, Peer, num_bytes
from benchmarks.triton_cases_layers import EPSILON, norm_formula
from benchmarks.triton_packed import BLOCK, GROUP, PackedWeight
from benchmarks.triton_torch import LORA, launch, load

KERNELS = load("norm_linear/kernels.py")
LAYERS = {"qkv": (4096, (4096, 1024, 1024)), "gate_up": (4096, (14336, 14336))}
"""Inputs and outputs of the layers of Llama 3 8B that read one norm."""
MOST_POSITIONS, SCALING = 16, 2.0
"""Maximum positions for which the norm_linear kernel multiplies packed weights, as in ops; scale of LoRA."""
OTHER_LAYERS = {"o": (4096, (4096,)), "down": (14336, (4096,))}


@dataclass
class Matrix:
    """Random weight [outputs, inputs].

    Attributes:
        stored: matrix, scales, group scales and offset, which are fields of `Layer`.
        exact: the dequantized values in float32; for an unquantized weight, the weight itself.
        form: weight format, a `Format`.
        packed: the 4-bit weight; None for other formats.
    """

    stored: tuple[torch.Tensor | None, ...]
    exact: torch.Tensor
    form: Any
    packed: PackedWeight | None = None

    @classmethod
    def random(cls, form: str, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> Matrix:
        """Return a weight in the form "dense" (not quantized), "nf4", "nf4_nested" (scales in 8 bits) or "int8"."""
        if form == "dense":
            exact = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
            return cls((exact, None, None, None), exact, KERNELS.Format())
        if form == "int8":
            codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
            scales = (torch.rand(outputs, device=device) + 0.5) / 127
            return cls((codes, scales, None, None), codes * scales[:, None], KERNELS.Format(8, inputs))
        group = GROUP if form == "nf4_nested" else 0
        packed = PackedWeight.random(outputs, inputs, device, "nf4", BLOCK, group)
        scale_levels, *of_groups = packed.nested if group else (None, None, None)
        tables = KERNELS.Format(4, BLOCK, group, packed.levels, scale_levels)
        return cls((packed.codes, packed.scales, *of_groups), packed.dequantize_in_torch(torch.float32), tables, packed)

    def layer(self, y: torch.Tensor) -> Any:
        """Return the layer whose kernel writes y [T, outputs]."""
        matrix, *scales = self.stored
        return KERNELS.Layer(matrix, y, None, *scales)


def decoding(
    norms: bool, dtype: torch.dtype, device: str, positions: int, inputs: int, outputs: tuple[int, ...], form: str
) -> Case:
    """Return the case of linear layers with one input, optionally after a residual addition and a norm."""
    matrices = [Matrix.random(form, each, inputs, dtype, device) for each in outputs]
    rounded = [matrix.exact.to(dtype) for matrix in matrices]
    x, addend = (torch.randn(positions, inputs, device=device).to(dtype) for _ in range(2))
    scale = (1 + torch.randn(inputs, device=device) / 8).to(dtype)

    def ours(x: torch.Tensor, *of_norm: torch.Tensor) -> list[torch.Tensor]:
        ys = [torch.empty(len(x), each, dtype=x.dtype, device=x.device) for each in outputs]
        layers = [matrix.layer(y) for matrix, y in zip(matrices, ys, strict=True)]
        if not norms:
            KERNELS.launch_norm_linear(launch, x, layers, matrices[0].form)
            return ys
        addend, scale = of_norm
        total = torch.empty_like(x)
        KERNELS.launch_norm_linear(launch, x, layers, matrices[0].form, scale, EPSILON, 0.0, addend, total)
        return [total, *ys]

    def summed(x: torch.Tensor, *of_norm: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the results before the layers, and the input of the layers."""
        if not norms:
            return [], x
        total = x + of_norm[0]
        return [total], norm_formula(total, of_norm[1])

    def formula(x: torch.Tensor, *of_norm: torch.Tensor) -> list[torch.Tensor]:
        results, normed = summed(x, *of_norm)
        weights = rounded if x.dtype == dtype else [matrix.exact.to(x.dtype) for matrix in matrices]
        return results + [normed @ weight.T for weight in weights]

    def bitsandbytes() -> Op:
        import bitsandbytes as bnb

        nested = form == "nf4_nested"
        quantize = functools.partial(bnb.functional.quantize_4bit, quant_type="nf4", blocksize=BLOCK)
        packed = [quantize(weight, compress_statistics=nested) for weight in rounded]

        def run(x: torch.Tensor, *of_norm: torch.Tensor) -> list[torch.Tensor]:
            results, normed = summed(x, *of_norm)
            return results + [bnb.matmul_4bit(normed, codes.t(), quant_state=state) for codes, state in packed]

        return run

    peer = Peer("bitsandbytes", bitsandbytes) if form.startswith("nf4") else None
    inputs_of_op = [x, addend, scale] if norms else [x]
    weights = [each for matrix in matrices for each in matrix.stored if each is not None]
    moved = num_bytes(*weights, *inputs_of_op) + positions * sum(outputs) * x.element_size()
    return Case(inputs_of_op, ours, formula, peer, forward_bytes=moved)


def adapted(
    in_one_pass: bool,
    dtype: torch.dtype,
    device: str,
    positions: int,
    inputs: int,
    outputs: int,
    rank: int,
    form: str,
) -> Case:
    """Return the case of a LoRA layer, in one launch or as a base matmul followed by an in-place update."""
    matrix = Matrix.random(form, outputs, inputs, dtype, device)
    shapes = (positions, inputs), (rank, inputs), (outputs, rank)
    operands = [(torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype) for shape in shapes]
    rounded = matrix.exact.to(dtype)

    def one_pass(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, inner = x.new_empty(len(x), outputs), x.new_empty(len(x), rank)
        LORA.launch_lora_linear(launch, x, matrix.layer(y), matrix.form, a, b, SCALING, inner)
        return y

    def in_parts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if form == "dense":
            y = x @ rounded.T
        elif len(x) <= MOST_POSITIONS:
            y = x.new_empty(len(x), outputs)
            KERNELS.launch_norm_linear(launch, x, [matrix.layer(y)], matrix.form)
        else:
            assert matrix.packed is not None, f"{form} is not dequantized to memory"
            y = matrix.packed.forward(x)
        LORA.launch_add_low_rank(launch, y, x @ a.T, b, SCALING, (1, rank))
        return y

    def formula(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        weight = rounded if x.dtype == dtype else matrix.exact.to(x.dtype)
        return x @ weight.T + x @ a.T @ b.T * SCALING

    moved = num_bytes(*(each for each in matrix.stored if each is not None), *operands)
    return Case(
        operands,
        one_pass if in_one_pass else in_parts,
        formula,
        forward_bytes=moved + positions * outputs * rounded.element_size(),
        forward_operations=2 * positions * inputs * outputs,
        programs=("ours", "eager", "compiled") if in_one_pass else ("ours",),
    )


def _adapted_shapes(forms: tuple[str, ...], positions: tuple[int, ...]) -> dict:
    layers = {"o": (4096, 4096), "up": (4096, 14336)}
    return {
        f"8b_{layer}_{form}_{count}": (BF16, count, *sizes, 16, form)
        for layer, sizes in layers.items()
        for form in forms
        for count in positions
    }


def _shapes(layers: dict[str, tuple[int, tuple[int, ...]]], forms: tuple[str, ...], positions: tuple[int, ...]) -> dict:
    return {
        f"8b_{layer}_{form}_{count}": (BF16, count, *sizes, form)
        for layer, sizes in layers.items()
        for form in forms
        for count in positions
    }


FORMS = ("dense", "nf4", "nf4_nested", "int8")
POSITIONS = (1, 16, 32, 64, 128, 256)
"""Position counts below and above `MOST_POSITIONS` of ops/lora_linear."""
CHECKS = [(count, 192, (33, 16, 5)[: 1 + count % 3], form) for count in (1, 3, 8, 16) for form in FORMS]
OPS = {
    "norm_linear": Entry(
        functools.partial(decoding, True), _shapes(LAYERS, ("dense", "nf4", "int8"), (1, 4, 16)), CHECKS
    ),
    "packed_linear": Entry(
        functools.partial(decoding, False), _shapes(OTHER_LAYERS, ("nf4", "int8"), (1, 4, 16)), CHECKS
    ),
    "lora_one_pass": Entry(
        functools.partial(adapted, True),
        _adapted_shapes(("dense", "nf4", "int8"), POSITIONS) | _adapted_shapes(("dense",), (8192,)),
        [(count, 192, 33, 5, form) for count in (1, 19, 70) for form in FORMS],
    ),
    "lora_in_parts": Entry(
        functools.partial(adapted, False),
        _adapted_shapes(("dense", "nf4"), (*POSITIONS, 8192)),
        [(count, 192, 33, 5, form) for count in (1, 19, 70) for form in ("dense", "nf4_nested")],
    ),
}
