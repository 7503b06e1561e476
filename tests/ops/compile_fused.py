"""Compile the kernels of losses, LoRA, AdamW and decoding for GPUs without one; test_compile_fused.py runs a part.

    python -m tests.ops.compile_fused            every kernel for a Hopper GPU
    python -m tests.ops.compile_fused --all      with more constants, and for consumer GPUs of the Ampere generation;
                                                 and every kernel of ops with all sizes of all tables of tile sizes

Prints one line per kernel: name, compute capability, bytes of shared memory, bytes of spilled registers per thread, and
the numbers of loads of 16 bytes and of instructions of tensor cores. Lines of tables have the resources of an entry.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.triton_tune import compiled
from benchmarks.triton_tune_cases import CASES
from paddlenlp_ext.ops.triton_utils import tile_sizes
from tests.common.scripts import ROOT, load_script

# By path: the packages of the ops import Paddle.
adamw, cross_entropy, lora_linear, norm_linear = (
    load_script(ROOT / "paddlenlp_ext" / "ops" / op / "kernels.py")
    for op in ("adamw", "linear_cross_entropy", "lora_linear", "norm_linear")
)

HOPPER, AMPERE = 90, 86
POINTERS = {
    **dict.fromkeys(("logits", "y", "inner", "factor", "gradient", "a", "b", "bias"), "*bf16"),
    **dict.fromkeys(("losses", "picked", "largest", "totals", "row_parts", "column_parts", "numbers"), "*fp32"),
    **dict.fromkeys(("levels1", "levels2", "borders1", "borders2"), "*fp32"),
    **dict.fromkeys(("targets", "first", "table"), "*i64"),
    **dict.fromkeys(("correct", "blocks"), "*i32"),
    **dict.fromkeys(("codes1", "codes2"), "*u8"),
    **dict.fromkeys(("x", "addend", "scale", "total", "bias0", "bias1", "bias2", "y0", "y1", "y2"), "*bf16"),
    **{f"{name}{index}": "*fp32" for name in ("group_scales", "offset") for index in ("", 0, 1, 2)},
    **dict.fromkeys(("levels", "scale_levels"), "*fp32"),
}
CODES = {0: "*bf16", 4: "*u8", 8: "*i8"}
"""Bits of a code -> the type of a matrix of them."""
NUMBERS = ("softcap", "scaling", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "epsilon", "norm_offset")


class Compiler:
    """Replacement of `triton_launch.launch` that compiles a kernel, and prints its line.

    Args:
        capability: compute capability, such as 90.
        types: Triton's type of each argument, by name; the others are int32.
    """

    def __init__(self, capability: int, types: Mapping[str, str]) -> None:
        self.capability, self.types = capability, types

    def __call__(self, kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        names, options = kernel.arg_names, {}
        for name in ("num_warps", "num_stages", "enable_fp_fusion"):
            if name in constants:
                options[name] = constants.pop(name)
        types = dict(self.types)
        if "BITS" in constants:
            types |= {f"matrix{index}": CODES[constants["BITS"]] for index in ("", 0, 1, 2)}
            types |= {f"scales{index}": "*u8" if constants["GROUP"] else "*fp32" for index in ("", 0, 1, 2)}
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        whole = [name for name in names if signature[name] not in ("constexpr", "fp32")]
        divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
        source = ASTSource(kernel, signature, places, divisible)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
        counts = (len(re.findall(pattern, ptx)) for pattern in (r"ld\.global\.v4\.b32|cp\.async\.cg", r"mma\S*\.sync"))
        print(kernel.__name__, self.capability, shared, spilled_bytes(compiled.asm["cubin"]), *counts)


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes of stack that a thread of a compiled kernel needs, by the disassembler in Triton's package."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return int(stack)


class Sized:
    """Tensor of which only shape and size of the elements matter."""

    def __init__(self, *shape: int, element_size: int = 2) -> None:
        self.shape, self.dtype, self._element_size = shape, f"{8 * element_size} bits", element_size

    def element_size(self) -> int:
        return self._element_size


def compile_all(capability: int, with_variants: bool) -> None:
    """Compile all kernels for the shapes of an 8B model."""
    tile_sizes.device_capability = lambda x: capability
    compiler, logits = Compiler(capability, POINTERS | dict.fromkeys(NUMBERS, "fp32")), Sized(2048, 128256)
    cross_entropy.launch_cross_entropy(compiler, logits, None, None, None, True, 30.0)
    cross_entropy.launch_row_statistics(compiler, logits, None, (None,) * 4, None)
    cross_entropy.launch_row_gradient(compiler, logits, None, None, None, None)
    for rank in (16, 32) if with_variants else (16,):
        lora_linear.launch_add_low_rank(compiler, Sized(8192, 14336), Sized(8192, rank), None, 2.0, (1, rank))
        operands = Sized(8192, 14336), Sized(8192, rank), Sized(14336, rank)
        lora_linear.launch_low_rank_gradients(compiler, lambda shape: None, *operands)
    formats = [
        norm_linear.Format(4, 64, 256),
        norm_linear.Format(),
        norm_linear.Format(4, 64),
        norm_linear.Format(8, 4096),
    ]
    for form in formats if with_variants else formats[:2]:
        for rows, rank in ((1, 16), (64, 16), (64, 64)) if with_variants else ((1, 16),):
            x, layer = Sized(rows, 4096), lora_linear.Layer(None, Sized(rows, 14336))
            lora_linear.launch_lora_linear(compiler, x, layer, form, None, None, 2.0, Sized(rows, rank))
    for form in formats if with_variants else formats[:1]:
        for positions in (1, 16):
            x, layers = Sized(positions, 4096), [norm_linear.Layer(None, Sized(positions, 14336))] * 2
            norm_linear.launch_norm_linear(compiler, x, layers, form, x, 1e-5, 0.0, addend=x, total=x)
    variants = [("bfloat16", "groups"), ("float32", "none"), ("float16", "nearest"), ("bfloat16", "single")]
    for weight, rounding in variants if with_variants else variants[:1]:
        kinds = {"WEIGHT": weight, "GRADIENT": weight, "ROUNDING": rounding, "ALIGNMENT": 16}
        betas, blocks = (0.9, 0.1, 0.99, 0.01), Sized(7, 2)
        adamw.launch_adamw(compiler, None, None, blocks, betas, kinds)
        adamw.launch_adamw_8bit(compiler, None, None, blocks, (None,) * 6, betas, 1e-8, kinds)


def compile_tables() -> None:
    """Compile each kernel with the sizes of each entry for the capability of the table."""
    for path in sorted(tile_sizes.FOLDER.glob("sm_*.json")):
        capability = int(path.stem.removeprefix("sm_"))
        for kernel, case in CASES.items():
            for bounds in case.bounds:
                numbers = {name: bounds.get(name, sys.maxsize) for name in case.sizes.bounds}
                resources = compiled(case, bounds, case.sizes.lookup(path, numbers), capability)
                assert resources.fits(capability), f"{path.name}: {kernel} {bounds}: {resources}"
                is_long = "rms_norm" in kernel and bounds["columns"] > 8192
                may_spill = is_long or "recurrence" in kernel or "delta_rule" in kernel  # every candidate spills
                assert may_spill or not resources.spilled, f"{path.name}: {kernel} {bounds}: {resources}"
                print(path.name, kernel, bounds, resources)


if __name__ == "__main__":
    with_variants = sys.argv[1:] == ["--all"]
    for capability in (HOPPER, AMPERE) if with_variants else (HOPPER,):
        compile_all(capability, with_variants)
    if with_variants:
        compile_tables()
