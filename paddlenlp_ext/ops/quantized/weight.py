"""Container of a quantized weight: codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import paddle


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight [out, in] quantized to 4 or 8 bits; N weights, B scales, G group scales.

    Attributes:
        algo: nf4, fp4, weight_only_int8 or weight_only_int4.
        shape: (out, in).
        block_size: number of neighbours in the flattened weight that share a scale; `in` for one scale per row.
        codes: uint8 [ceil(N / 2)], two per byte, the first in the high half; weight_only_int8: int8 [N].
        scales: float32 [B], or uint8 codes if `group_scales` is set.
        group_scales: float32 [G].
        offset: float32 [1], mean of the scales, subtracted before they were quantized.
        group_size: number of neighbouring scales that share a group scale; 0 if scales are not quantized.
        is_residual: whether part of the original weight was subtracted before quantizing; an adapter adds it back.
        kernel_cache: tensors that a kernel derives from the codes once and reuses.
    """

    algo: str
    shape: tuple[int, int]
    block_size: int
    codes: paddle.Tensor
    scales: paddle.Tensor
    group_scales: paddle.Tensor | None = None
    offset: paddle.Tensor | None = None
    group_size: int = 0
    is_residual: bool = False
    kernel_cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_weights(self) -> int:
        """N, the number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        tensors = (self.codes, self.scales, self.group_scales, self.offset)
        return sum(tensor.size * tensor.element_size() for tensor in tensors if tensor is not None)
