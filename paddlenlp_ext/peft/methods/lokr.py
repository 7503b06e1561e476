"""LoKr: Low-Rank Kronecker Product, a Kronecker-factored update (LyCORIS, Yeh et al. 2023, arXiv:2309.14859).

    y = x W^T + x delta^T        delta W = s W1 (x) W2        s = alpha / r
    W1 [a, c] = 0, W2 [b, d] ~ Kaiming-uniform        out = a b, in = c d

If max(b, d) > 2 r, W2 is a product of two matrices with inner dimension r. With `decompose_both`, W1 is also a
product of two matrices if max(a, c) > 2 r. The forward pass does not compute delta W: for x reshaped to [c, d], x
delta^T = s W1 x W2^T.

Shapes: r rank; the adapted linear has c * d input features and a * b output features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.peft.config import refuse_unread_fields
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.layers import LinearAdapter, kaiming_uniform
from paddlenlp_ext.peft.lycoris_config import LycorisConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style


@PEFT_METHODS.register("lokr")
@dataclass(kw_only=True)
class LoKrConfig(LycorisConfig):
    """Options of LoKr.

    >>> LoKrConfig(r=4, decompose_factor=8).alpha
    4
    """

    peft_type: ClassVar[str] = "LOKR"
    targets_key: ClassVar[str] = "lokr_target_modules"
    own_fields: ClassVar[tuple[str, ...]] = ("decompose_factor", "decompose_both")
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lokr_config.json")

    r: int = option(
        8,
        help="rank r of a decomposed factor",
        minimum=1,
        maximum=65536,
        aliases=("lokr_dim",),
        arguments=("lora_dim", "rank"),
        key="lokr_rank",
    )
    alpha: float | None = option(
        None, help="the update is scaled by alpha / rank; unset or 0: the scale is 1", minimum=0
    )
    decompose_factor: int = option(
        -1,
        help="number of rows and of columns of the first factor, rounded down to divisors of out_features and "
        "in_features; -1: both factors have about the same size",
        minimum=-1,
        arguments=("factor",),
        key="lokr_factor",
    )
    decompose_both: bool = option(False, help="decompose the first factor too, if it is large compared to the rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        # PaddleNLP stores alpha 0 and trains with a scale of 1.
        self.alpha = self.alpha or self.r
        if self.decompose_factor == 0:
            raise ValueError("lokr_factor=0 is out of range; allowed: -1, or at least 1")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LoKrLinear:
        return LoKrLinear(base, *self.rank_and_scaling(name), self.decompose_factor, self.decompose_both, seed, name)

    # -- files --------------------------------------------------------------------------------------------------------
    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LoKrConfig:
        """Read PaddleNLP's fields, but ignore `scaling`: PaddleNLP writes 0 although it trains with scale 1."""
        read = {"lokr_dim", "lokr_alpha", "factor", "decompose_both", "target_modules", "scaling"}
        read |= {"dtype", "tensor_parallel_degree"}  # these fields do not affect a stored adapter
        refuse_unread_fields(fields, read)
        return cls(
            r=fields.get("lokr_dim", 8),
            alpha=fields.get("lokr_alpha"),
            decompose_factor=fields.get("factor", -1),
            decompose_both=fields.get("decompose_both", False),
            target_modules=fields.get("target_modules"),
        )

    @classmethod
    def tensors_from_paddlenlp(cls, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the factors, without the copies of alpha; PaddleNLP's factors have the same layout."""
        return {name: value for name, value in tensors.items() if not name.endswith(".lokr_alpha")}


class LoKrLinear(LinearAdapter):
    """Linear layer with a Kronecker-factored update.

    Args:
        rank: r, the inner dimension of decomposed factors.
        scaling: s, the factor of the update.
        factor: as in `factorize`.
        decompose_both: also decompose a large W1.
        seed: random seed of the initial values.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(
        self, base: nn.Layer, rank: int, scaling: float, factor: int, decompose_both: bool, seed: int, name: str
    ) -> None:
        super().__init__(base)
        self.scaling = scaling
        (a, b), (c, d) = factorize(self.out_features, factor), factorize(self.in_features, factor)

        def new_factor(own_name: str, shape: tuple[int, int], zero: bool = False) -> None:
            value = np.zeros(shape, np.float32) if zero else kaiming_uniform(shape, seed, f"{name}.{own_name}")
            setattr(self, own_name, self.new_parameter(value))

        if decompose_both and rank < max(a, c) / 2:
            new_factor("lokr_w1_a", (a, rank), zero=True)
            new_factor("lokr_w1_b", (rank, c))
        else:
            new_factor("lokr_w1", (a, c), zero=True)
        if rank < max(b, d) / 2:
            new_factor("lokr_w2_a", (b, rank))
            new_factor("lokr_w2_b", (rank, d))
        else:
            new_factor("lokr_w2", (b, d))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out] without computing delta W."""
        w1, w2 = self.matrices("lokr_w1"), self.matrices("lokr_w2")
        inner = x.reshape([-1, w1[-1].shape[1], w2[-1].shape[1]])  # [tokens, c, d]
        if self.in_features <= self.out_features:  # transpose the smaller of input and output
            inner = _apply_to_last_axis(_apply_to_middle_axis(inner, w1), w2)
        else:
            inner = _apply_to_middle_axis(_apply_to_last_axis(inner, w2), w1)
        return self.base(x) + (inner * self.scaling).reshape([*x.shape[:-1], -1])

    def delta_weight(self) -> paddle.Tensor:
        """Return s W1 (x) W2, float32 [out, in]."""
        w1, w2 = (self._full_factor(name) for name in ("lokr_w1", "lokr_w2"))
        return paddle.kron(w1, w2) * self.scaling

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        assert style in ("colwise", "rowwise", "replicated"), f"a linear layer cannot be sharded {style}"
        axes = {
            "colwise": {"lokr_w1": 0, "lokr_w1_a": 0},
            "rowwise": {"lokr_w1": 1, "lokr_w1_b": 1},
            "replicated": {},
        }[style]
        return {name: axes.get(name) for name in self.own_state()}

    def matrices(self, name: str) -> list[paddle.Tensor]:
        """Return the matrices whose product is the factor `name`: two if the factor is decomposed, otherwise one."""
        factor = getattr(self, name, None)
        return [getattr(self, f"{name}_a"), getattr(self, f"{name}_b")] if factor is None else [factor]

    def _full_factor(self, name: str) -> paddle.Tensor:
        first, *rest = (matrix.astype("float32") for matrix in self.matrices(name))
        return paddle.matmul(first, rest[0]) if rest else first


def _apply_to_last_axis(x: paddle.Tensor, matrices: list[paddle.Tensor]) -> paddle.Tensor:
    """Apply the product of the matrices to the last of three axes, as 2-D matmuls."""
    rows = x.reshape([-1, x.shape[-1]])
    for matrix in reversed(matrices):
        rows = paddle.matmul(rows, matrix, transpose_y=True)
    return rows.reshape([*x.shape[:-1], -1])


def _apply_to_middle_axis(x: paddle.Tensor, matrices: list[paddle.Tensor]) -> paddle.Tensor:
    return _apply_to_last_axis(x.transpose([0, 2, 1]), matrices).transpose([0, 2, 1])


def factorize(size: int, factor: int = -1) -> tuple[int, int]:
    """Split `size` into two integer factors.

    The first factor is `factor` if it divides `size`. Otherwise, the first factor is the largest divisor of `size` that
    is at most sqrt(size) and, unless `factor` is -1, at most `factor`.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = math.isqrt(size) if factor == -1 else min(factor, math.isqrt(size))
    first = max(divisor for divisor in range(1, limit + 1) if size % divisor == 0)
    return first, size // first
