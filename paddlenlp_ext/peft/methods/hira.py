"""HiRA: Hadamard High-Rank Adaptation, where the update is the elementwise product of W and B A (Huang et al. 2025).

    y = x W^T + b + dropout(x) delta^T        delta W = W * (B A)
    A [r, in] Kaiming-uniform, B [out, r] = 0 at the start

ICLR 2025, https://openreview.net/forum?id=TwJrTz9cRS. The rank of the update is at most r times the rank of W. The
update has no scale.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, factor_axes, kaiming_uniform
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, dropout_option, rank_option
from paddlenlp_ext.peft.recomputed_delta import product_with_update
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style


@PEFT_METHODS.register("hira")
@dataclass(kw_only=True)
class HiRAConfig(LinearTargetsConfig):
    """Options of HiRA.

    >>> HiRAConfig(r=16, hira_dropout=0.1).r
    16
    """

    peft_type: ClassVar[str] = "HIRA"
    targets_key: ClassVar[str] = "hira_target_modules"
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"hira_dropout"}

    r: int = rank_option(32, "hira_rank", "rank r of the matrix that multiplies the weight")
    hira_dropout: float = dropout_option("hira_dropout")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LinearAdapter:
        return HiRALinear(base, self.r, self.hira_dropout, seed, name)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "hira_dropout": self.hira_dropout,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "fan_in_fan_out": False,
            "init_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> HiRAConfig:
        read = {"r", "hira_dropout", "target_modules", "layers_to_transform", "layers_pattern"}
        # `init_weights` affects only initial values. PEFT 0.21 ignores `rank_pattern` for linear layers.
        refuse_unread_fields(fields, read | {"init_weights", "rank_pattern"})
        return cls(
            r=fields.get("r", 32),
            hira_dropout=fields.get("hira_dropout", 0.0),
            target_modules=targets_from_peft(fields),
        )


HiraConfig = HiRAConfig  # the spelling of Hugging Face PEFT


class HiRALinear(LinearAdapter):
    """Linear layer whose update is the elementwise product of its weight and a low-rank matrix.

    Args:
        rank: r, the rank of the matrix.
        seed: random seed of the initial values of A.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: nn.Layer, rank: int, dropout: float, seed: int, name: str) -> None:
        super().__init__(base)
        self.dropout = dropout
        self.hira_A = self.new_parameter(kaiming_uniform((rank, self.in_features), seed, f"{name}.hira_A"))
        self.hira_B = self.new_parameter(np.zeros((self.out_features, rank), np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; computing delta W takes r * in * out multiplications in each pass."""
        return self.base(x) + product_with_update(self.apply_dropout(x), self._update, self.hira_A, self.hira_B)

    def delta_weight(self) -> paddle.Tensor:
        """Return W * (B A), float32 [out, in]."""
        return self._update(self.hira_A, self.hira_B)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        a_axis, b_axis = factor_axes(style)
        return {"hira_A": a_axis, "hira_B": b_axis}

    def _update(self, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        return self.base.weight_value() * paddle.matmul(b.astype("float32"), a.astype("float32"))
