"""Compile the 4-bit kernels for a Hopper GPU, without a GPU; run by test_triton.py in a separate process.

Prints one line per variant: kernel, dtype, whether scales are nested, number of loads of 8 bytes or more.
"""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paddlenlp_ext.ops.dequantize.kernels import dequantize_kernel
from paddlenlp_ext.ops.quantized_linear.kernels import product_kernel

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {"BLOCK": 64, "GROUP": 256, "BYTES": 1024, "OUTPUTS": 2, "BLOCKS": 8}
WARPS = {dequantize_kernel: 4, product_kernel: 1}


def compile_kernel(kernel: triton.JITFunction, dtype: str, nested: bool) -> str:
    """Return the kernel's PTX for typical layer sizes: addresses and widths are multiples of 16."""
    names = kernel.arg_names
    pointers = dict.fromkeys(("levels", "scale_levels", "group_scales", "offset"), "*fp32")
    pointers |= dict.fromkeys(("x", "y", "out"), f"*{dtype}")
    pointers |= {"codes": "*u8", "scales": "*u8" if nested else "*fp32"}
    constants = {name: value for name, value in CONSTANTS.items() if name in names} | {"NESTED": nested}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants}
    source = ASTSource(kernel, signature, places, divisible)
    return triton.compile(source, target=HOPPER, options={"num_warps": WARPS[kernel]}).asm["ptx"]


if __name__ == "__main__":
    for kernel in WARPS:
        for dtype in ("fp32", "bf16", "fp16"):
            for nested in (False, True):
                wide = re.findall(r"ld\.global\.v[24]\.b32", compile_kernel(kernel, dtype, nested))
                print(kernel.__name__, dtype, nested, len(wide))
