"""Compile the 4-bit kernels for a Hopper card, which needs no card: run by test_triton_4bit.py in a process of its own.

Prints a line for each: kernel, format, whether scales are nested, matrix instructions in its assembly.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paddlenlp_ext.ops.triton.kernels_4bit import dequantize_kernel, product_kernel

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {"BLOCK": 64, "GROUP": 256, "BYTES": 64, "POSITIONS": 16, "OUTPUTS": 16}


def compile_kernel(kernel: triton.JITFunction, dtype: str, nested: bool) -> str:
    """The kernel's PTX."""
    pointers = dict.fromkeys(("levels", "scale_levels", "group_scales", "offset"), "*fp32")
    pointers |= dict.fromkeys(("x", "y", "out"), f"*{dtype}")
    pointers |= {"codes": "*u8", "scales": "*u8" if nested else "*fp32"}
    constants = {name: value for name, value in CONSTANTS.items() if name in kernel.arg_names} | {"NESTED": nested}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, places), target=HOPPER).asm["ptx"]


if __name__ == "__main__":
    for kernel in (dequantize_kernel, product_kernel):
        for dtype in ("fp32", "bf16", "fp16"):
            for nested in (False, True):
                print(kernel.__name__, dtype, nested, compile_kernel(kernel, dtype, nested).count("mma.sync"))
