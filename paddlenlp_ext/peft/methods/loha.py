"""LoHa: Low-Rank Hadamard Product, an elementwise product of two low-rank updates.

Introduced as FedPara (Hyeon-Woo et al. 2021, arXiv:2108.06098), used for fine-tuning in LyCORIS (arXiv:2309.14859).

    y = x W^T + x delta^T        delta W = s (A1 B1) * (A2 B2)        s = alpha / r
    A1, A2 [out, r], B1 [r, in] ~ Kaiming-uniform, B2 [r, in] = 0

The rank of the update is at most r^2: delta W = s A B. Each column of A [out, r^2] is the elementwise product of a
column of A1 and a column of A2. Each row of B [r^2, in] is the elementwise product of a row of B1 and a row of B2. If
r^2 is small, the forward pass uses A and B instead of delta W.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.peft.layers import LinearAdapter, factor_axes, kaiming_uniform
from paddlenlp_ext.peft.linear_method_config import rank_option
from paddlenlp_ext.peft.lycoris_config import LycorisConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style


@PEFT_METHODS.register("loha")
@dataclass(kw_only=True)
class LoHaConfig(LycorisConfig):
    """Options of LoHa.

    >>> LoHaConfig(r=4).alpha
    4
    """

    peft_type: ClassVar[str] = "LOHA"
    targets_key: ClassVar[str] = "loha_target_modules"

    r: int = rank_option(
        8, "loha_rank", "rank r of two low-rank matrices; the update, their elementwise product, has rank up to r * r"
    )
    alpha: float | None = option(None, help="the update is scaled by alpha / rank; unset: the scale is 1", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = self.r if self.alpha is None else self.alpha

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LoHaLinear:
        return LoHaLinear(base, *self.rank_and_scaling(name), seed, name)


class LoHaLinear(LinearAdapter):
    """Linear layer with an update that is an elementwise product of two low-rank matrices.

    Args:
        rank: r, the rank of both matrices.
        scaling: s, the factor of the update.
        seed: random seed of the initial values.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: nn.Layer, rank: int, scaling: float, seed: int, name: str) -> None:
        super().__init__(base)
        self.scaling = scaling
        left, right = (self.out_features, rank), (rank, self.in_features)

        def new_factor(own_name: str, shape: tuple[int, int]) -> paddle.Tensor:
            return self.new_parameter(kaiming_uniform(shape, seed, f"{name}.{own_name}"))

        self.hada_w1_a, self.hada_w1_b = new_factor("hada_w1_a", left), new_factor("hada_w1_b", right)
        self.hada_w2_a = new_factor("hada_w2_a", left)
        self.hada_w2_b = self.new_parameter(np.zeros(right, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; the result is computed from A and B if delta W would cost more."""
        if not self.uses_factors():
            delta = self._hadamard_delta(self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
            return self.base(x) + paddle.matmul(x, delta, transpose_y=True)
        inner, outer = _khatri_rao_factors(self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
        narrow = paddle.matmul(x, inner, transpose_y=True) * self.scaling
        return self.base(x) + paddle.matmul(narrow, outer, transpose_y=True)

    def uses_factors(self) -> bool:
        """Return whether multiplying by A and B is cheaper than computing delta W."""
        inner_rank, size = self.hada_w1_a.shape[1] ** 2, self.in_features * self.out_features
        return inner_rank * (self.in_features + self.out_features) < size

    def delta_weight(self) -> paddle.Tensor:
        """Return s (A1 B1) * (A2 B2), float32 [out, in]."""
        return self._hadamard_delta(*self._in_float32())

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor] | None:
        """Return s B [r^2, in] and A [out, r^2]; None if r^2 is at least `in` or at least `out`."""
        if self.hada_w1_a.shape[1] ** 2 >= min(self.in_features, self.out_features):
            return None
        inner, outer = _khatri_rao_factors(*self._in_float32())
        return inner * self.scaling, outer

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        in_axis, out_axis = factor_axes(style)
        return {"hada_w1_a": out_axis, "hada_w1_b": in_axis, "hada_w2_a": out_axis, "hada_w2_b": in_axis}

    def _in_float32(self) -> tuple[paddle.Tensor, ...]:
        factors = (self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
        return tuple(factor.astype("float32") for factor in factors)

    def _hadamard_delta(
        self, a1: paddle.Tensor, b1: paddle.Tensor, a2: paddle.Tensor, b2: paddle.Tensor
    ) -> paddle.Tensor:
        return paddle.matmul(a1, b1) * paddle.matmul(a2, b2) * self.scaling


def _khatri_rao_factors(
    a1: paddle.Tensor, b1: paddle.Tensor, a2: paddle.Tensor, b2: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return B [r^2, in] and A [out, r^2] with A B = (A1 B1) * (A2 B2)."""
    width = a1.shape[1] ** 2
    outer = (a1.unsqueeze(2) * a2.unsqueeze(1)).reshape([-1, width])
    inner = (b1.unsqueeze(1) * b2.unsqueeze(0)).reshape([width, -1])
    return inner, outer
