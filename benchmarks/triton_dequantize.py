"""Bandwidth of the 4-bit Triton kernels on a GPU for weights of an 8B model, compared with bitsandbytes.

Uses PyTorch tensors. Needs `torch` and `triton` (requirements-peers.txt with a CUDA build of torch), but not Paddle;
measures `bitsandbytes` if it is installed. Prints one JSON line per shape and format:

    python -m benchmarks.triton_dequantize
    TRITON_INTERPRET=1 python -m benchmarks.triton_dequantize --check     on a CPU: small shapes, no times

Times are medians, with the L2 cache flushed before each run. All times include `empty_ms`, the time of an empty kernel.
Bandwidth counts one read of codes and scales and one write of the weight. `copy_gb_per_s` is the bandwidth of a copy of
a tensor larger than the caches.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch

from benchmarks.measure import report
from benchmarks.triton_packed import BLOCK, PackedWeight
from benchmarks.triton_timing import copy_bandwidth, device_of, milliseconds

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]  # [out, in] of Llama 3 8B's projections
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHECKED = [  # shape, format, weights that share a scale, scales that share a group scale
    ((50, 192), "nf4", 64, 0),
    ((48, 192), "nf4", 64, 3),
    ((37, 96), "fp4", 32, 7),
    ((5, 64), "nf4", 2, 4),
    ((33, 512), "fp4", 512, 5),
]
FEW, MANY = (1, 2, 4), 2048
"""Positions of a decoding step, and of a training step."""


def check(device: str) -> None:
    """Compare both kernels with PyTorch on small weights."""
    for shape, algo, block, group in CHECKED:
        weight = PackedWeight.random(*shape, device, algo, block, group)
        for dtype in FORMATS.values():
            if device == "cpu" and dtype == torch.bfloat16:
                continue  # Triton's interpreter truncates float32 to bfloat16, but a GPU rounds
            want = weight.dequantize_in_torch(dtype)
            torch.testing.assert_close(weight.dequantize(torch.empty_like(want)), want)
            x = torch.randn(2, shape[1], device=device).to(dtype)
            got = weight.product(x, torch.empty(2, shape[0], dtype=dtype, device=device))
            exact = x.double() @ weight.dequantize_in_torch(torch.float32).double().T
            assert (got - exact).norm() < (1e-6 if dtype == torch.float32 else 4e-3) * exact.norm(), (shape, dtype)


def times_of_bitsandbytes(full: torch.Tensor) -> dict[str, float]:
    """Return the times of bitsandbytes in milliseconds, for a weight [out, in]; empty if it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(full, quant_type="nf4", blocksize=BLOCK)
    x = torch.randn(1, full.shape[1], device="cuda").to(full.dtype)
    return {
        "dequantize_bitsandbytes_ms": milliseconds(lambda: functional.dequantize_4bit(codes, state)),
        "product_1_bitsandbytes_ms": milliseconds(lambda: functional.gemv_4bit(x, codes.t(), state=state)),
    }


def measure_shape(outputs: int, inputs: int, name: str) -> dict[str, object]:
    """Return times in milliseconds and bandwidths of one shape in one format."""
    dtype, weight = FORMATS[name], PackedWeight.random(outputs, inputs, "cuda")
    out = torch.empty(weight.shape, dtype=dtype, device="cuda")
    nothing = torch.empty(1, device="cuda")
    times = {
        "empty_ms": milliseconds(nothing.zero_),
        "dequantize_ms": milliseconds(lambda: weight.dequantize(out)),
        "dequantize_torch_ms": milliseconds(lambda: weight.dequantize_in_torch(dtype)),
    }
    figures: dict[str, object] = {"shape": [outputs, inputs], "format": name}
    moved = weight.num_bytes + out.numel() * out.element_size()
    figures["dequantize_gb_per_s"] = round(moved / times["dequantize_ms"] / 1e6)
    for positions in (*FEW, MANY):
        x = torch.randn(positions, inputs, device="cuda").to(dtype)
        y = torch.empty(positions, outputs, dtype=dtype, device="cuda")
        if positions in FEW:
            times[f"product_{positions}_ms"] = milliseconds(lambda x=x, y=y: weight.product(x, y))
        times[f"dequantize_and_multiply_{positions}_ms"] = milliseconds(lambda x=x: x @ weight.dequantize(out).T)
        times[f"full_precision_product_{positions}_ms"] = milliseconds(lambda x=x: x @ out.T)
    times |= times_of_bitsandbytes(out)
    return figures | {key: round(value, 4) for key, value in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the kernels with PyTorch on small weights")
    args = parser.parse_args()
    device = device_of(args.check)
    check(device)
    if args.check:
        print(f"both kernels agree with PyTorch on the {device}")
        return
    card = {"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": round(copy_bandwidth())}
    for outputs, inputs in SHAPES:
        for name in FORMATS:
            report("triton_dequantize", {**card, **measure_shape(outputs, inputs, name)}, "torch", "triton")


if __name__ == "__main__":
    main()
