"""How close the 4-bit Triton kernels come to a GPU's memory, for weights of an 8B model.

With PyTorch's tensors, so that PyTorch does the same beside them; needs `torch` and `triton` (requirements-peers.txt
with a CUDA build of torch), no Paddle. Prints one JSON line a shape and format:

    PYTHONPATH=. python benchmarks/triton_dequantize.py
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/triton_dequantize.py --check     on a CPU: small, no times

Bandwidth counts what must be read and written once: codes, scales and the weight; for a product codes, scales and both
vectors. `copy_gb_per_s`, a copy of a tensor larger than any cache, is what the card reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import triton

from measure import report
from paddlenlp_ext.ops.quant_levels import levels
from paddlenlp_ext.ops.triton.kernels_4bit import dequantize_kernel, product_kernel

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]  # [out, in] of Llama 3 8B's projections
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BLOCK, BYTES = 64, 1024
POSITIONS = (1, 16)


class PackedWeight:
    """A random nf4 weight [outputs, inputs] without double quantization."""

    def __init__(self, outputs: int, inputs: int, device: str) -> None:
        count = outputs * inputs
        self.shape = (outputs, inputs)
        self.codes = torch.randint(0, 256, (count // 2,), dtype=torch.uint8, device=device)
        self.scales = torch.rand(count // BLOCK, device=device) + 0.5
        self.levels = torch.from_numpy(levels("nf4").copy()).to(device)
        self.format = {"BLOCK": BLOCK, "GROUP": 1, "NESTED": False}

    @property
    def num_bytes(self) -> int:
        """Codes and scales."""
        return self.codes.numel() + 4 * self.scales.numel()

    def dequantize(self, out: torch.Tensor) -> torch.Tensor:
        """By the kernel, into `out`."""
        tables = (self.levels, self.scales, self.levels, self.levels, self.levels)  # the last three are not read
        grid = (triton.cdiv(out.numel(), 2 * BYTES),)
        dequantize_kernel[grid](self.codes, *tables, out, out.numel(), 0, BYTES=BYTES, **self.format)
        return out

    def dequantize_in_torch(self, dtype: torch.dtype) -> torch.Tensor:
        """The same in PyTorch's own operations."""
        pairs = torch.stack([self.codes >> 4, self.codes & 15], dim=1).flatten()
        blocks = self.levels[pairs.int()].reshape(-1, BLOCK) * self.scales[:, None]
        return blocks.reshape(self.shape).to(dtype)

    def product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x W^T by the kernel, into `y`."""
        (positions, inputs), outputs = x.shape, self.shape[0]
        tables = (self.levels, self.scales, self.levels, self.levels, self.levels)
        grid = (triton.cdiv(outputs, 16), triton.cdiv(positions, 16))
        product_kernel[grid](
            x, self.codes, *tables, y, positions, outputs, inputs, POSITIONS=16, OUTPUTS=16, BYTES=64, **self.format
        )
        return y


def check(device: str) -> None:
    """Hold both kernels to PyTorch on a small weight."""
    weight = PackedWeight(48, 192, device)
    for dtype in FORMATS.values():
        if device == "cpu" and dtype == torch.bfloat16:
            continue  # the interpreter multiplies no such matrices (tests/ops/test_triton_4bit.py)
        want = weight.dequantize_in_torch(dtype)
        torch.testing.assert_close(weight.dequantize(torch.empty_like(want)), want)
        x = torch.randn(3, 192, device=device).to(dtype)
        got = weight.product(x, torch.empty(3, 48, dtype=dtype, device=device))
        torch.testing.assert_close(got, (x.float() @ want.float().T).to(dtype), rtol=1e-2, atol=1e-2)


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of a call, the L2 cache emptied before each."""
    return triton.testing.do_bench(run, return_mode="median")


def copy_bandwidth() -> float:
    """GB/s that a plain copy of 2 GB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e6


def measure_shape(outputs: int, inputs: int, name: str, copy_gb_per_s: float) -> dict[str, object]:
    """Times in milliseconds and bandwidths of one shape in one format."""
    dtype, weight = FORMATS[name], PackedWeight(outputs, inputs, "cuda")
    out = torch.empty(weight.shape, dtype=dtype, device="cuda")
    compiled = torch.compile(weight.dequantize_in_torch)
    times = {
        "dequantize_ms": milliseconds(lambda: weight.dequantize(out)),
        "dequantize_torch_ms": milliseconds(lambda: weight.dequantize_in_torch(dtype)),
        "dequantize_torch_compile_ms": milliseconds(lambda: compiled(dtype)),
    }
    moved = weight.num_bytes + out.numel() * out.element_size()
    figures: dict[str, object] = {"shape": [outputs, inputs], "format": name, "copy_gb_per_s": round(copy_gb_per_s)}
    figures["dequantize_gb_per_s"] = round(moved / times["dequantize_ms"] / 1e6)
    figures["dequantize_of_copy"] = round(moved / times["dequantize_ms"] / 1e6 / copy_gb_per_s, 3)
    for positions in POSITIONS:
        x = torch.randn(positions, inputs, device="cuda").to(dtype)
        y = torch.empty(positions, outputs, dtype=dtype, device="cuda")
        times[f"product_{positions}_ms"] = milliseconds(lambda x=x, y=y: weight.product(x, y))
        times[f"torch_full_precision_product_{positions}_ms"] = milliseconds(lambda x=x: x @ out.T)
        moved = weight.num_bytes + (x.numel() + y.numel()) * out.element_size()
        figures[f"product_{positions}_gb_per_s"] = round(moved / times[f"product_{positions}_ms"] / 1e6)
    return figures | {key: round(value, 4) for key, value in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only hold the kernels to PyTorch on a small weight")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.check:
        raise SystemExit("times need a GPU; with TRITON_INTERPRET=1 and --check the kernels run on a CPU")
    check(device)
    if args.check:
        print(f"both kernels agree with PyTorch on the {device}")
        return
    copy_gb_per_s = copy_bandwidth()
    for outputs, inputs in SHAPES:
        for name in FORMATS:
            figures = measure_shape(outputs, inputs, name, copy_gb_per_s)
            report("triton_dequantize", {"gpu": torch.cuda.get_device_name(), **figures}, "torch", "triton")


if __name__ == "__main__":
    main()
