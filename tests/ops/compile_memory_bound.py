"""Compile the kernels of norms, rotations and gates for a Hopper GPU, without a GPU; run by test_memory_bound.py.

Prints one line per kernel: its name, and the numbers of loads and of stores of 16 bytes. The test compiles the largest
kernels; an argument `all` adds the others:

    python -m tests.ops.compile_memory_bound all
"""

from __future__ import annotations

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paddlenlp_ext.ops.gates.kernels import gate_backward_kernel, gate_forward_kernel
from paddlenlp_ext.ops.rms_norm.kernels import rms_norm_backward_kernel, rms_norm_forward_kernel
from paddlenlp_ext.ops.rope.kernels import norm_rope_backward_kernel, rope_kernel
from paddlenlp_ext.ops.triton_utils.column_sums import column_sums_kernel

HOPPER = GPUTarget("cuda", 90, 32)
ROWS = {"ROWS": 1, "COLUMNS": 4096, "num_warps": 8}
HEADS = {"HEADS": 16, "HEAD_DIM": 128, "ROTARY_DIM": 128, "HALF": 64, "REST": 0, "num_warps": 4}
LARGEST = [
    (rms_norm_backward_kernel, {"ADDS": True, "SUMS": True, **ROWS}),
    (norm_rope_backward_kernel, {"NORM": "before", "SUMS": True, "INTERLEAVED": False, **HEADS}),
    (gate_backward_kernel, {"ACTIVATION": "clamped", "COLUMNS": 2048, "num_warps": 4}),
]
OTHERS = [
    (rms_norm_forward_kernel, {"ADDS": True, **ROWS}),
    (column_sums_kernel, {"ROWS": 64, "COLUMNS": 32, "num_warps": 4}),
    (rope_kernel, {"NORM": "none", "BACK": True, "INTERLEAVED": True, **HEADS}),
    (rope_kernel, {"NORM": "before", "BACK": False, "INTERLEAVED": False, **HEADS}),
    (gate_forward_kernel, {"ACTIVATION": "gelu", "COLUMNS": 2048, "num_warps": 4}),
]
FLOATS = ("epsilon", "offset", "alpha", "limit")
INTEGERS = re.compile(r"num_\w+|\w*size|\w+_stride|first_row|tokens")
IN_FLOAT32 = ("partials", "cos", "sin")


def compile_kernel(kernel: triton.JITFunction, constants: dict[str, object]) -> str:
    """Return the kernel's PTX in bfloat16 for typical layer sizes: addresses and widths are multiples of 16."""
    names, options = kernel.arg_names, {"num_warps": constants["num_warps"]}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in FLOATS:
            return "fp32"
        return "i32" if INTEGERS.fullmatch(name) else "*fp32" if name in IN_FLOAT32 else "*bf16"

    signature = {name: kind(name) for name in names}
    places = {(names.index(name),): value for name, value in constants.items() if name in names}
    divisible = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, type_ in signature.items()
        if type_ not in ("constexpr", "fp32") and name not in ("num_tiles", "tokens", "first_row")
    }
    return triton.compile(ASTSource(kernel, signature, places, divisible), target=HOPPER, options=options).asm["ptx"]


if __name__ == "__main__":
    for kernel, constants in LARGEST + (OTHERS if "all" in sys.argv[1:] else []):
        ptx = compile_kernel(kernel, constants)
        print(kernel.__name__, *(len(re.findall(rf"{way}\.global\.v4\.b32", ptx)) for way in ("ld", "st")))
