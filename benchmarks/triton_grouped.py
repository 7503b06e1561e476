"""Speed of the Triton kernels of grouped matmuls on a GPU, compared with a loop of PyTorch matmuls.

Uses PyTorch tensors. Needs `torch` and `triton` (requirements-peers.txt with a CUDA build of torch), but not Paddle.
Prints one JSON line per layer, format and load of the experts:

    python -m benchmarks.triton_grouped
    python -m benchmarks.triton_grouped --rows 64 128 --columns 64 128 256     other tile sizes
    TRITON_INTERPRET=1 python -m benchmarks.triton_grouped --check             on a CPU: small shapes, no times

Times are medians with the L2 cache flushed before each run. `tflops` counts the multiplications and additions of actual
rows. `even`: all experts have the same number of rows. `skewed`: the number of rows decreases geometrically from expert
to expert, and the last experts have no rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import triton

from benchmarks.measure import report
from benchmarks.triton_timing import device_of, milliseconds
from tests.common.scripts import bare_packages

with bare_packages("grouped_linear"):
    from paddlenlp_ext.ops.grouped_linear.kernels import grouped_product_kernel, grouped_weight_gradient_kernel

LAYERS = {  # experts, chosen, hidden, inner outputs (gate and up)
    "mixtral-8x7b": (8, 2, 4096, 2 * 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 2 * 768),
    "gpt-oss-20b": (32, 4, 2880, 2 * 2880),
}
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENS = (64, 4096)
"""Tokens of a decoding step and of a training step."""
CHECKED = [([3, 0, 11, 1], 37, 50), ([0, 40, 7], 64, 20), ([16], 16, 16)]  # rows of the groups, inputs, outputs


class Grouped:
    """Random rows and weights [groups, outputs, inputs], and the three products."""

    def __init__(
        self, counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, device: str, tile: tuple[int, int]
    ) -> None:
        total, self.tile = sum(counts), tile
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        self.x = torch.randn(total, inputs, device=device).to(dtype)
        self.gradient = torch.randn(total, outputs, device=device).to(dtype)
        self.weight = (torch.randn(len(counts), outputs, inputs, device=device) / inputs**0.5).to(dtype)
        self.bounds = torch.from_numpy(self.starts.astype(np.int32)).to(device)
        rows = tile[0]
        tiles = [
            (group, first, min(first + rows, last))
            for group, (first, last) in enumerate(pairwise(self.starts.tolist()))
            for first in range(first, last, rows)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.terms = 32 if dtype == torch.float32 else 64

    def forward(self) -> torch.Tensor:
        """Return x W^T."""
        return self._product(self.x, self.weight.shape[1], self.weight.shape[2], 1)

    def input_gradient(self) -> torch.Tensor:
        """Return dy W."""
        return self._product(self.gradient, self.weight.shape[2], 1, self.weight.shape[2])

    def _product(self, x: torch.Tensor, columns: int, column_stride: int, term_stride: int) -> torch.Tensor:
        y, (rows, width) = torch.empty(len(x), columns, dtype=x.dtype, device=x.device), self.tile
        grid = (len(self.tiles) * triton.cdiv(columns, width),)
        grouped_product_kernel[grid](
            x, self.weight, y, self.tiles, len(self.tiles), columns, x.shape[1], self.weight[0].numel(),
            column_stride, term_stride,
            ROWS=rows, COLUMNS=width, TERMS=self.terms, BAND=8, num_warps=8 if rows * width > 64 * 128 else 4,
        )  # fmt: skip
        return y

    def weight_gradient(self) -> torch.Tensor:
        """Return dy^T x of each group."""
        out, (groups, outputs, inputs) = torch.empty_like(self.weight), self.weight.shape
        side = self.tile[1]
        grid = (groups * triton.cdiv(outputs, side) * triton.cdiv(inputs, side),)
        grouped_weight_gradient_kernel[grid](
            self.gradient, self.x, out, self.bounds, outputs, inputs,
            OUTPUTS=side, INPUTS=side, ROWS=self.terms, num_warps=8 if side > 64 else 4,
        )  # fmt: skip
        return out

    def in_torch(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return functions that compute the three products in PyTorch, group by group."""
        groups = [(g, a, b) for g, (a, b) in enumerate(pairwise(self.starts.tolist())) if a < b]

        def weight_gradient() -> torch.Tensor:
            result = torch.zeros_like(self.weight)
            for g, a, b in groups:
                torch.mm(self.gradient[a:b].T, self.x[a:b], out=result[g])
            return result

        return {
            "forward": lambda: torch.cat([self.x[a:b] @ self.weight[g].T for g, a, b in groups]),
            "input_gradient": lambda: torch.cat([self.gradient[a:b] @ self.weight[g] for g, a, b in groups]),
            "weight_gradient": weight_gradient,
        }


def check(device: str) -> None:
    """Compare the kernels with PyTorch on small groups."""
    for counts, inputs, outputs in CHECKED:
        for dtype in FORMATS.values():
            if device == "cpu" and dtype == torch.bfloat16:
                continue  # Triton's interpreter truncates float32 to bfloat16, but a GPU rounds
            op = Grouped(counts, inputs, outputs, dtype, device, (16, 16))
            for name, expected in op.in_torch().items():
                want, got = expected().double(), getattr(op, name)().double()
                tolerance = 1e-5 if dtype == torch.float32 else 8e-3
                assert (got - want).norm() <= tolerance * want.norm(), (name, counts, dtype)


def counts_of(load: str, rows: int, experts: int) -> list[int]:
    """Return the rows of each expert."""
    if load == "even":
        return [rows // experts] * experts
    weights = 0.5 ** (np.arange(experts) * 8 / experts)
    weights[-(experts // 8) :] = 0
    return np.floor(weights / weights.sum() * rows).astype(int).tolist()


def measure(layer: str, name: str, tokens: int, load: str, tile: tuple[int, int]) -> dict[str, object]:
    """Return times in milliseconds and speeds of one layer."""
    experts, chosen, hidden, outputs = LAYERS[layer]
    counts = counts_of(load, tokens * chosen, experts)
    op = Grouped(counts, hidden, outputs, FORMATS[name], "cuda", tile)
    figures: dict[str, object] = {"layer": layer, "format": name, "tokens": tokens, "load": load, "tile": list(tile)}
    operations = 2 * sum(counts) * hidden * outputs
    for product, in_torch in op.in_torch().items():
        own, other = milliseconds(getattr(op, product)), milliseconds(in_torch)
        figures |= {f"{product}_ms": round(own, 4), f"{product}_torch_ms": round(other, 4)}
        figures[f"{product}_tflops"] = round(operations / own / 1e9, 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the kernels with PyTorch on small groups")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128], help="number of rows of a tile")
    parser.add_argument("--columns", type=int, nargs="+", default=[128], help="number of columns of a tile")
    args = parser.parse_args()
    device = device_of(args.check)
    torch.manual_seed(0)
    check(device)
    if args.check:
        print(f"the kernels agree with PyTorch on the {device}")
        return
    card = {"gpu": torch.cuda.get_device_name()}
    runs = [
        (layer, name, tokens, load, (rows, columns))
        for layer in LAYERS
        for name in FORMATS
        for tokens in TOKENS
        for load in ("even", "skewed")
        for rows in args.rows
        for columns in args.columns
    ]
    for run in runs:
        report("triton_grouped", {**card, **measure(*run)}, "torch", "triton")


if __name__ == "__main__":
    main()
