"""Resources of Triton kernels, compiled with or without a GPU: registers, spills, shared memory."""

from __future__ import annotations

import subprocess
import tempfile
from math import prod
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor (CUDA C++ Programming Guide, table of the compute capabilities); sizes in KiB."""

    threads: int
    programs: int
    shared: int
    shared_of_program: int
    registers: int = 65536


MULTIPROCESSORS = {
    80: Multiprocessor(2048, 32, 164, 163),
    86: Multiprocessor(1536, 16, 100, 99),
    89: Multiprocessor(1536, 24, 100, 99),
    90: Multiprocessor(2048, 32, 228, 227),
    100: Multiprocessor(2048, 32, 228, 227),
    120: Multiprocessor(1536, 24, 100, 99),
}
"""Compute capability -> limits of a multiprocessor."""
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Resources(NamedTuple):
    """Resources of a compiled kernel: registers and spilled bytes of a thread, bytes of shared memory, warps."""

    registers: int
    spilled: int
    shared: int
    warps: int

    def fits(self, capability: int) -> bool:
        """Return whether the kernel can be launched."""
        return self.shared <= MULTIPROCESSORS[capability].shared_of_program << 10

    def occupancy(self, capability: int) -> float:
        """Return the number of warps that a multiprocessor can hold, as a fraction of its maximum."""
        limits, threads = MULTIPROCESSORS[capability], 32 * self.warps
        of_warp = -(-self.registers * 32 // 256) * 256  # registers are allocated in units of 256
        by_shared = (limits.shared << 10) // (self.shared + 1024)  # the system takes 1 KiB per program
        by_threads = min(limits.threads // threads, limits.registers // (of_warp * self.warps), limits.programs)
        return min(by_shared, by_threads) * threads / limits.threads


class Shaped:
    """Tensor without memory, with the methods that launches call."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self.dtype.lstrip("bfpiu")) // 8

    def data_ptr(self) -> int:
        """Return an aligned address."""
        return 256

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def stride(self, axis: int) -> int:
        """Return the stride of an axis of a contiguous tensor."""
        return prod(self.shape[axis % len(self.shape) + 1 :])


class Compiler:
    """Launcher that compiles kernels for a compute capability and does not run them; `compiled` has their resources."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.compiled: list[Resources] = []

    def __call__(self, kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Compile with Triton's specialization: None, numbers that are 1, and addresses and numbers divisible by 16."""
        options = {"enable_fp_fusion": True} | {name: constants.pop(name) for name in _OPTIONS if name in constants}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        assert values.keys() == set(kernel.arg_names), f"{kernel.__name__}: {kernel.arg_names}, got {[*values]}"
        types = {name: _type(value, name in constants) for name, value in values.items()}
        constexprs = {(kernel.arg_names.index(name),): values[name] for name in values if types[name] == "constexpr"}
        divisible = {
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, value in values.items()
            if types[name].startswith("*") or (types[name][0] == "i" and value % 16 == 0)
        }
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constexprs, divisible)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        registers, spilled = _registers(compiled.asm["cubin"])
        metadata = compiled.metadata
        self.compiled.append(Resources(registers, spilled, metadata.shared, metadata.num_warps))


def _type(value: Any, is_constant: bool) -> str:
    if isinstance(value, Shaped):
        return "*" + value.dtype
    if is_constant or value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _registers(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread; the stack of our kernels contains only spilled registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(pair.split(":", 1) for pair in printed.split() if pair.startswith(("REG:", "STACK:")))
    return int(usage["REG"]), int(usage["STACK"])
