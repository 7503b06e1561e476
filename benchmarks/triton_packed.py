"""Weights in 4 bits on PyTorch's tensors, with the kernels of paddlenlp_ext/ops/dequantize and quantized_linear."""

from __future__ import annotations

import torch
import triton

from benchmarks import triton_torch
from benchmarks.triton_torch import CODEBOOKS, load

UNPACK, PRODUCT = load("dequantize/kernels.py"), load("quantized_linear/kernels.py")
BLOCK, GROUP = 64, 256
"""Weights that share a scale, and scales that share a group scale, as in QLoRA."""


class PackedWeight:
    """Weight [outputs, inputs] in 4 bits; it is the base of a `LoraLinear`.

    Args:
        shape: outputs and inputs.
        codes: two codes per byte, uint8 [outputs * inputs / 2].
        scales: one scale per block, float32 or uint8 codes.
        nested: levels, group scales and offset of 8-bit scales; None for float32 scales.
        algo: quantization format.
        block: number of weights per scale.
        group: number of scales per group scale.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        codes: torch.Tensor,
        scales: torch.Tensor,
        nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        algo: str = "nf4",
        block: int = BLOCK,
        group: int = GROUP,
    ) -> None:
        self.shape, self.codes, self.scales = shape, codes, scales
        self.levels = torch.from_numpy(CODEBOOKS.levels(algo).copy()).to(codes.device)
        self.nested = nested or (self.levels,) * 3  # not read
        self.format = {"BLOCK": block, "GROUP": max(1, group), "NESTED": nested is not None}

    @classmethod
    def random(
        cls, outputs: int, inputs: int, device: str, algo: str = "nf4", block: int = BLOCK, group: int = 0
    ) -> PackedWeight:
        """Return a random weight, with scales in full precision (group 0) or in 8 bits by groups."""
        count, num_scales, nested = outputs * inputs, outputs * inputs // block, None
        codes = torch.randint(0, 256, (count // 2,), dtype=torch.uint8, device=device)
        if group:
            scales = torch.randint(0, 256, (num_scales,), dtype=torch.uint8, device=device)
            groups = torch.rand(-(-num_scales // group), device=device) + 0.5
            nested = _scale_levels(device), groups, torch.full((1,), 0.25, device=device)
        else:
            scales = torch.rand(num_scales, device=device) + 0.5
        return cls((outputs, inputs), codes, scales, nested, algo, block, group)

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedWeight:
        """Quantize a weight to nf4 with scales in 8 bits, as QLoRA does (arXiv:2305.14314)."""
        blocks = weight.detach().float().reshape(-1, BLOCK)
        largest = blocks.abs().amax(1)
        borders = torch.from_numpy(CODEBOOKS.boundaries("nf4")[0].copy()).to(weight.device)
        normal = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(normal, borders, out_int32=True).to(torch.uint8).reshape(-1, 2)
        levels, offset = _scale_levels(weight.device), largest.mean()
        count = len(largest)
        padded = torch.nn.functional.pad(largest - offset, (0, -count % GROUP)).reshape(-1, GROUP)
        groups = padded.abs().amax(1)
        relative = padded / groups.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        scales = torch.bucketize(relative, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)
        packed = codes[:, 0] << 4 | codes[:, 1]
        return cls((*weight.shape,), packed, scales.flatten()[:count], (levels, groups, offset.reshape(1)))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()

    @property
    def full_scales(self) -> torch.Tensor:
        """Return the scales in float32."""
        if not self.format["NESTED"]:
            return self.scales
        levels, groups, offset = self.nested
        return levels[self.scales.int()] * groups.repeat_interleave(self.format["GROUP"])[: len(self.scales)] + offset

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return levels, scales, scale levels, group scales and offset."""
        return (self.levels, self.scales, *self.nested)

    def dequantize(self, out: torch.Tensor) -> torch.Tensor:
        """Dequantize with the kernel, into `out`."""
        count, num_bytes, sizes = out.numel(), self.codes.numel(), UNPACK.DEQUANTIZE_SIZES(out)
        grid, tensors = (triton.cdiv(num_bytes, sizes["BYTES"]),), (self.codes, *self.tables, out)
        triton_torch.launch(UNPACK.dequantize_kernel, grid, *tensors, count, num_bytes, 0, **sizes, **self.format)
        return out

    def dequantize_in_torch(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize with PyTorch's own operations."""
        pairs = torch.stack([self.codes >> 4, self.codes & 15], dim=1).flatten()
        blocks = self.levels[pairs.int()].reshape(-1, self.format["BLOCK"]) * self.full_scales[:, None]
        return blocks.reshape(self.shape).to(dtype)

    def product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute x W^T with the kernel, into `y`."""
        (outputs, inputs), sizes = self.shape, PRODUCT.PRODUCT_SIZES(x)
        sizes["BLOCKS"] = sizes.pop("INPUTS") // self.format["BLOCK"]
        grid, tensors = (triton.cdiv(outputs, sizes["OUTPUTS"]), len(x)), (x, self.codes, *self.tables, y)
        triton_torch.launch(PRODUCT.product_kernel, grid, *tensors, outputs, inputs, **sizes, **self.format)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T [..., O] over the dequantized weight."""
        return x @ self._dequantized(x.dtype).T

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return dy W [T, I] over the dequantized weight."""
        return gradient @ self._dequantized(gradient.dtype)

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.dequantize(torch.empty(self.shape, dtype=dtype, device=self.codes.device))


def _scale_levels(device: str | torch.device) -> torch.Tensor:
    return torch.from_numpy(CODEBOOKS.dynamic_levels().copy()).to(device)
