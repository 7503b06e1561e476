"""LoRA that does not start at zero: a start (A0, B0) is taken off again, so that the model begins as its base.

    y = x W^T + s (dropout(x) A^T) B^T - s (x A0^T) B0^T        delta W = s (B A - B0 A0)

The papers that start so write W - s B0 A0 over the base. The same model is had without touching it: switched off it is
the base to the bit, nothing has to be computed again when it is loaded, and half-precision weights are not rounded a
second time. The price is a second product of rank r.

    s (B A - B0 A0) = s [B, -B0] [A; A0]

is a plain LoRA of rank 2r, and that is what files hold (offset_files.py).

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.peft.lora import LoRALinear
from paddlenlp_ext.sharding_spec import Style, cut_of

A_WEIGHT, B_WEIGHT = "lora_A.weight", "lora_B.weight"
A_START, B_START = "lora_A_start", "lora_B_start"


class OffsetLoRALinear(LoRALinear):
    """A linear with a low-rank update that counts from a start of its own.

    Args:
        base, rank, scaling, dropout, seed, name: as `LoRALinear`'s.
        keep_start: whether the start belongs to the adapter's state; without, it can be computed again.
        base_lacks_start: whether the base was quantized without the start, so that it is not to be taken off again.
    """

    def __init__(
        self,
        base: nn.Layer,
        rank: int,
        scaling: float,
        dropout: float,
        seed: int,
        name: str,
        keep_start: bool = True,
        base_lacks_start: bool = False,
    ) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        self.base_lacks_start = base_lacks_start
        # The start of a base that lacks it is exactly what was taken off.
        start_dtype = paddle.float32 if base_lacks_start else self.dtype
        zeros_A = paddle.zeros([rank, base.in_features], dtype=start_dtype)
        zeros_B = paddle.zeros([base.out_features, rank], dtype=start_dtype)
        self.register_buffer(A_START, zeros_A, persistable=keep_start)
        self.register_buffer(B_START, zeros_B, persistable=keep_start)

    @paddle.no_grad()
    def start_at(
        self,
        a: paddle.Tensor,
        b: paddle.Tensor,
        taken_a: paddle.Tensor | None = None,
        taken_b: paddle.Tensor | None = None,
    ) -> None:
        """Begin at A = `a` [r, in] and B = `b` [out, r], and take s B A off, or what is given of the same shapes.

        All are those of the whole layer; of one that is cut, this part's are taken.
        """
        set_own_part(self.lora_A.weight, a)
        set_own_part(self.lora_B.weight, b)
        set_own_part(self.lora_A_start, a if taken_a is None else taken_a)
        set_own_part(self.lora_B_start, b if taken_b is None else taken_b)

    def adapted(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out]. The two updates meet first: at the start they cancel to exactly nothing."""
        if self.base_lacks_start:
            return self.base(x) + self.update(x)
        inner = paddle.matmul(x, self.lora_A_start, transpose_y=True) * self.scaling
        start = paddle.matmul(inner, self.lora_B_start, transpose_y=True)
        return self.base(x) + (self.update(x) - start)

    def in_one_step(self) -> bool:
        return False

    def kept_numbers(self) -> float:
        """x A^T and x A0^T."""
        return super().kept_numbers() * (1 if self.base_lacks_start else 2)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """[A; A0] and s [B, -B0]; A and s B where the base lacks the start."""
        a, b = super().low_rank_factors()
        if self.base_lacks_start:
            return a, b
        b_start = self.lora_B_start.astype("float32") * -self.scaling
        return paddle.concat([a, self.lora_A_start.astype("float32")]), paddle.concat([b, b_start], axis=1)

    def placements(self, style: Style) -> dict[str, int | None]:
        """The start is cut as what starts from it."""
        cuts = super().placements(style)
        return {**cuts, A_START: cuts[A_WEIGHT], B_START: cuts[B_WEIGHT]}


def set_own_part(tensor: paddle.Tensor, value: paddle.Tensor) -> None:
    """Give a tensor its values, or where it is cut, its part of them."""
    cut = cut_of(tensor)
    tensor.set_value((value if cut is None else value[cut.index]).astype(tensor.dtype))
