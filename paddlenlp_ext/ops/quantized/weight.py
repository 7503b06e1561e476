"""A weight stored as codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import paddle


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] in few bits.

    Attributes:
        algo: nf4, fp4, weight_only_int8 or weight_only_int4.
        shape: (out, in).
        block_size: neighbours in the flattened weight that share a scale; `in` for one scale a row.
        codes: uint8 [ceil(N / 2)], two a byte, the first in the high half; weight_only_int8: int8 [N].
        scales: float32 [B], or their uint8 codes where `group_scales` is there.
        group_scales: float32 [G].
        offset: float32 [1], the mean of the scales, taken off before they were quantized.
        group_size: neighbouring scales that share one of `group_scales`; 0 without.
        lacks_start: whether a part of the original weight was taken off first, which an adapter adds again.
        kept: what a kernel makes of the codes once and wants to see again.
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
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_weights(self) -> int:
        """N."""
        return self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """What the tensors occupy."""
        tensors = (self.codes, self.scales, self.group_scales, self.offset)
        return sum(tensor.size * tensor.element_size() for tensor in tensors if tensor is not None)
