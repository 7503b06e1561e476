"""IA3: learned scales of keys, values and the feed-forward's inner activations (Liu et al. 2022, arXiv 2205.05638).

    y = l * (x W^T + b)        l [out] = 1        keys, values
    y = (l * x) W^T + b        l [in] = 1         the feed-forward's last linear

Merged, the rows (columns) of W are scaled, and with the rows the bias.

Shapes: in/out features of the adapted linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.inject import (
    as_targets,
    linear_names,
    matches,
    select_targets,
    shortest_targets,
    targets_from_peft,
)
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style

FEEDFORWARD = ("down_proj",)
TARGETS = ("k_proj", "v_proj", *FEEDFORWARD)


@PEFT_METHODS.register("ia3")
@dataclass(kw_only=True)
class IA3Config(PeftConfig):
    """Options of IA3."""

    peft_type: ClassVar[str] = "IA3"
    random_start: ClassVar[bool] = False
    changes_bias: ClassVar[bool] = True
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"feedforward_modules"}

    target_modules: tuple[str, ...] | None = option(
        TARGETS, help="Linear layers to scale, as ends of names or regular expressions."
    )
    feedforward_modules: tuple[str, ...] | None = option(
        FEEDFORWARD, help="Those of them whose input is scaled; the others' output is."
    )

    def __post_init__(self) -> None:
        self.target_modules = as_targets(self.target_modules)
        self.feedforward_modules = as_targets(self.feedforward_modules)

    def targets(self, model: nn.Layer) -> list[str]:
        chosen = select_targets(linear_names(model), self.target_modules, "ia3_target_modules")
        if self.feedforward_modules and self.feedforward_modules != FEEDFORWARD:
            select_targets(chosen, self.feedforward_modules, "ia3_feedforward_modules")
        return chosen

    def wrap(self, name: str, base: nn.Layer, seed: int) -> IA3Linear:
        entries = self.feedforward_modules or ()
        return IA3Linear(base, any(matches(entry, name, "ia3_feedforward_modules") for entry in entries))

    def warm_start(self, stored: PeftConfig) -> IA3Config:
        assert isinstance(stored, IA3Config)
        return dataclasses.replace(stored, path=self.path)

    def decays(self, parameter_name: str) -> bool:
        """No: the base is a scale of 1, and decay pulls to 0."""
        return False

    def to_adapter_config(self, model: nn.Layer) -> dict[str, Any]:
        targets = [name for name, _ in adapter_layers(model)]
        feedforward = [name for name, layer in adapter_layers(model) if layer.scales_input]
        short = shortest_targets(targets, model), shortest_targets(feedforward, model)
        # PEFT wants the one list to hold the other, entry by entry.
        targets, feedforward = short if set(short[1]) <= set(short[0]) else (targets, feedforward)
        return {
            "target_modules": targets,
            "feedforward_modules": feedforward,
            "fan_in_fan_out": False,
            "init_ia3_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> IA3Config:
        read = {"target_modules", "feedforward_modules", "init_ia3_weights"}
        refuse_unread_fields(fields, read)
        feedforward = fields.get("feedforward_modules")
        return cls(
            target_modules=targets_from_peft(fields),
            feedforward_modules=FEEDFORWARD if feedforward is None else feedforward,
        )


class IA3Linear(LinearAdapter):
    """A linear whose input or output is scaled, feature by feature.

    Args:
        base: has `in_features`, `out_features` and a forward from [..., in] to [..., out].
        scales_input: or else the output.
    """

    def __init__(self, base: nn.Layer, scales_input: bool) -> None:
        super().__init__(base)
        self.scales_input = scales_input
        shape = (1, base.in_features) if scales_input else (base.out_features, 1)
        self.ia3_l = self.new_parameter(np.ones(shape, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out], in the format that the base gives: under autocast that may not be the scales'."""
        scales = self.ia3_l.flatten()
        if self.scales_input:
            return self.base(x * scales.astype(x.dtype))
        out = self.base(x)
        return out * scales.astype(out.dtype)

    def delta_weight(self) -> paddle.Tensor:
        """W * (l - 1), float32 [out, in]; l as a row or a column."""
        return self.base.weight_value() * (self.ia3_l.astype("float32") - 1)

    def delta_bias(self) -> paddle.Tensor | None:
        """b * (l - 1), float32 [out], where outputs are scaled."""
        bias = getattr(self.base, "bias", None)
        if bias is None or self.scales_input:
            return None
        return bias.astype("float32") * (self.ia3_l.astype("float32").flatten() - 1)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Cut with the features that are scaled."""
        cuts: dict[str, int | None] = {"colwise": 0, "rowwise": 1, "replicated": None}
        assert style in cuts, f"a linear is not cut {style}"
        return {"ia3_l": cuts[style] if cuts[style] == int(self.scales_input) else None}
