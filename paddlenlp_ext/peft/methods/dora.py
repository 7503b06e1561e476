"""DoRA: Weight-Decomposed Low-Rank Adaptation (Liu et al. 2024, arXiv:2402.09353).

    W' = m (W + s B A) / c        c_i = |row i of W + s B A|, treated as a constant in the backward pass (section 4.3)

Each row of the weight is decomposed into a trained magnitude m [out] and a direction, which LoRA updates. m starts as
the row norms of W, so the initial model equals its base. The squared norms are computed without forming W + s B A:

    c_i^2 = |w_i|^2 + 2 s (W A^T)_i . b_i + s^2 b_i (A A^T) b_i^T        w_i, b_i: row i of W and of B

As in Hugging Face PEFT, dropout applies to the update and to the change of the magnitude:

    y = x W^T + b + (m / c - 1) x' W^T + (m / c) s x' A^T B^T        x' = dropout(x)

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.layers import has_values
from paddlenlp_ext.peft.lora.layers import LoRALinear
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig, RandomInitConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style


@PEFT_METHODS.register("use_dora")
@dataclass(kw_only=True)
class DoRAConfig(RandomInitConfig):
    """Options of DoRA: LoRA on the direction of each weight row, and a trained magnitude.

    >>> DoRAConfig(r=4).lora_alpha
    8
    """

    starts_from_weights: ClassVar[bool] = True  # type: ignore[override]

    def wrap(self, name: str, base: nn.Layer, seed: int) -> DoRALinear:
        rank, scaling = self.rank_and_scaling(name)
        return self.with_initial_a(DoRALinear(base, rank, scaling, self.lora_dropout, seed, name), name, seed)

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {**super().to_adapter_config(model), "use_dora": True}

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return bool(fields.get("use_dora"))

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        return super().from_adapter_config({name: value for name, value in fields.items() if name != "use_dora"})


class DoRALinear(LoRALinear):
    """Linear layer with a trained magnitude and a low-rank update of the direction of each row.

    The arguments are the same as for `LoRALinear`.
    """

    base_squared_norms: paddle.Tensor

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        squares_O = (
            _squared_row_norms(self.base.weight_value()) if has_values(base) else paddle.ones([self.out_features])
        )
        self.register_buffer("base_squared_norms", squares_O, persistable=False)
        self.lora_magnitude_vector = self.new_parameter(squares_O.sqrt().numpy())

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        result = self.base(x)
        scale_O = self.lora_magnitude_vector / self.direction_norms().astype(self.dtype)
        if self.dropout and self.training:
            x = self.apply_dropout(x)
            unbiased = self.base.forward_without_bias(x)
        else:
            bias = getattr(self.base, "bias", None)
            unbiased = result if bias is None else result - bias
        inner = paddle.matmul(x, self.lora_A.weight, transpose_y=True) * self.scaling
        update = paddle.matmul(inner, self.lora_B.weight, transpose_y=True)
        base_scale_O, update_scale_O = (scale_O - 1.0).astype(result.dtype), scale_O.astype(result.dtype)
        return result + base_scale_O * unbiased + update_scale_O * update

    @paddle.no_grad()
    def direction_norms(self) -> paddle.Tensor:
        """Return c, the row norms of W + s B A, float32 [out]."""
        a, b = self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32")
        with paddle.amp.auto_cast(enable=False):
            cross = self.reduce_over_inputs(self.base.forward_without_bias(self.lora_A.weight).astype("float32").T)
            square = paddle.matmul(b, self.reduce_over_inputs(paddle.matmul(a, a, transpose_y=True)))
        return (self.base_squared_norms + self.scaling * ((2.0 * cross + self.scaling * square) * b).sum(axis=1)).sqrt()

    def delta_weight(self) -> paddle.Tensor:
        """Return m (W + s B A) / c - W, float32 [out, in]."""
        weight = self.base.weight_value()
        a, b = self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32") * self.scaling
        directed = weight + paddle.matmul(b, a)
        lengths_O = _squared_row_norms(directed).sqrt()
        return directed * (self.lora_magnitude_vector.astype("float32") / lengths_O).unsqueeze(1) - weight

    def low_rank_factors(self) -> None:
        """Return None, because scaling the rows of W is not a low-rank update."""
        return None

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        axis = 0 if style == "colwise" else None
        return {**super().sharding_axes(style), "lora_magnitude_vector": axis, "base_squared_norms": axis}


@paddle.no_grad()
def _squared_row_norms(weight: paddle.Tensor) -> paddle.Tensor:
    return weight.astype("float32").square().sum(axis=1)
