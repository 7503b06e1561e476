"""IA3: Infused Adapter by Inhibiting and Amplifying Inner Activations (Liu et al. 2022, arXiv:2205.05638).

| layer | formula | trained |
| --- | --- | --- |
| keys, values | y = l * (x W^T + b) | l [out], 1 at the start |
| last linear of the feed-forward | y = (l * x) W^T + b | l [in], 1 at the start |

Merging scales the rows of W and the bias, or the columns of W.

Shapes: in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, adapter_layers_of
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import linear_names, select_targets, shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style
from paddlenlp_ext.utils.layer_name_patterns import matches

FEEDFORWARD = ("down_proj",)
TARGETS = ("k_proj", "v_proj", *FEEDFORWARD)
_LATENT_TARGETS = ("kv_b_proj", *FEEDFORWARD)


@PEFT_METHODS.register("ia3")
@dataclass(kw_only=True)
class IA3Config(PeftConfig):
    """Options of IA3.

    >>> IA3Config().target_modules
    ('k_proj', 'v_proj', 'down_proj')
    """

    peft_type: ClassVar[str] = "IA3"
    changes_bias: ClassVar[bool] = True
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"feedforward_modules"}

    target_modules: tuple[str, ...] | None = option(
        TARGETS,
        help="linear layers to scale, as name suffixes or regular expressions; in models with latent attention, the "
        "default selects kv_b_proj and down_proj",
    )
    feedforward_modules: tuple[str, ...] | None = option(
        FEEDFORWARD, help="target layers whose input is scaled instead of the output"
    )

    def targets(self, model: TrainableModel) -> list[str]:
        names, requested = linear_names(model), self.target_modules
        if requested == TARGETS and any(name.endswith(_LATENT_TARGETS[0]) for name in names):
            requested = _LATENT_TARGETS  # latent attention computes keys and values in one layer
        chosen = select_targets(names, requested, "ia3_target_modules")
        if self.feedforward_modules and self.feedforward_modules != FEEDFORWARD:
            select_targets(chosen, self.feedforward_modules, "ia3_feedforward_modules")
        return chosen

    def wrap(self, name: str, base: nn.Layer, seed: int) -> IA3Linear:
        entries = self.feedforward_modules or ()
        return IA3Linear(base, any(matches(entry, name, "ia3_feedforward_modules") for entry in entries))

    def decays(self, parameter_name: str) -> bool:
        """Return False: weight decay would pull the scales toward 0, but their neutral value is 1."""
        return False

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        targets = [name for name, _ in adapter_layers(model)]
        feedforward = [name for name, layer in adapter_layers_of(model, IA3Linear) if layer.scales_input]
        short = shortest_targets(targets, model), shortest_targets(feedforward, model)
        # PEFT requires every entry of feedforward_modules to be in target_modules.
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
    """Linear layer with a trained scale on each input or output feature.

    Args:
        scales_input: scale the input instead of the output.
    """

    def __init__(self, base: nn.Layer, scales_input: bool) -> None:
        super().__init__(base)
        self.scales_input = scales_input
        shape = (1, self.in_features) if scales_input else (self.out_features, 1)
        self.ia3_l = self.new_parameter(np.ones(shape, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out] in the dtype of the base."""
        scales = self.ia3_l.flatten()
        if self.scales_input:
            return self.base(x * scales.astype(x.dtype))
        out = self.base(x)
        return out * scales.astype(out.dtype)

    def delta_weight(self) -> paddle.Tensor:
        """Return W * (l - 1), float32 [out, in], where l is a row [1, in] or a column [out, 1]."""
        return self.base.weight_value() * (self.ia3_l.astype("float32") - 1)

    def delta_bias(self) -> paddle.Tensor | None:
        """Return b * (l - 1), float32 [out]; None if the input is scaled or the base has no bias."""
        bias = getattr(self.base, "bias", None)
        if bias is None or self.scales_input:
            return None
        return bias.astype("float32") * (self.ia3_l.astype("float32").flatten() - 1)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        axes: dict[str, int | None] = {"colwise": 0, "rowwise": 1, "replicated": None}
        assert style in axes, f"a linear layer cannot be sharded {style}"
        return {"ia3_l": axes[style] if axes[style] == int(self.scales_input) else None}
