"""Compile the kernels of grouped products for a Hopper GPU, without a GPU; run by test_triton.py.

Prints one line per kernel: its name and the number of instructions of tensor cores.
"""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paddlenlp_ext.ops.grouped_linear.kernels import grouped_product_kernel, grouped_weight_gradient_kernel

HOPPER = GPUTarget("cuda", 90, 32)
COLUMNS, TERMS = 128, 64


def compile_kernel(kernel: triton.JITFunction, sizes: dict[str, int]) -> str:
    """Return the kernel's PTX in bfloat16 for typical layer sizes: addresses and widths are multiples of 16."""
    names = kernel.arg_names
    pointers = dict.fromkeys(("x", "weight", "y", "gradient", "out"), "*bf16")
    pointers |= dict.fromkeys(("tiles", "starts"), "*i32")
    signature = {name: "constexpr" if name in sizes else pointers.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in sizes.items()}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in sizes}
    source = ASTSource(kernel, signature, places, divisible)
    return triton.compile(source, target=HOPPER, options={"num_warps": 8}).asm["ptx"]


if __name__ == "__main__":
    product = {"ROWS": 128, "COLUMNS": COLUMNS, "TERMS": TERMS, "BAND": 8}
    weight_gradient = {"OUTPUTS": COLUMNS, "INPUTS": COLUMNS, "ROWS": TERMS}
    for kernel, sizes in ((grouped_product_kernel, product), (grouped_weight_gradient_kernel, weight_gradient)):
        print(kernel.__name__, len(re.findall(r"wgmma\.mma_async", compile_kernel(kernel, sizes))))
