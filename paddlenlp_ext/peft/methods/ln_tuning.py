"""LN tuning: train only the scales of the normalization layers (Zhao et al. 2023, arXiv:2312.11420).

    y = x / sqrt(mean(x^2) + epsilon) * w        w [D] starts as the base's scale

The paper trains the scale and the bias of LayerNorm. The norms of this package have only the parameter w. These norms
are RMS norms (the formula above; in Gemma the scale is 1 + w), or layer norms without bias (Cohere). Merging replaces
the base's w, so the results of the merged model are bitwise equal to the results of the model with the adapter.

Shapes: D length of the normalized axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.layer_norm import LayerNorm
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.submodules import layer_at
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import Factor, WeightAdapter, adapter_layers, has_values
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import select_targets, shortest_targets, targets_from_peft


@PEFT_METHODS.register("ln_tuning")
@dataclass(kw_only=True)
class LNTuningConfig(PeftConfig):
    """Options of LN tuning.

    >>> LNTuningConfig(target_modules=["input_layernorm"]).target_modules
    ('input_layernorm',)
    """

    peft_type: ClassVar[str] = "LN_TUNING"
    starts_from_weights: ClassVar[bool] = True

    target_modules: tuple[str, ...] | None = option(
        None,
        help="norms to train, as name suffixes or regular expressions; norms of queries and keys (q_norm, k_norm) are "
        "allowed; unset: all norms of hidden states",
    )

    def targets(self, model: TrainableModel) -> list[str]:
        norms = [name for name, layer in model.named_sublayers() if isinstance(layer, RMSNorm | LayerNorm)]
        if self.target_modules is None:
            decoder = model.model
            of_hidden = [decoder.norm, *(norm for layer in decoder.layers for norm in layer.norms())]
            return [name for name in norms if any(layer_at(model, name) is norm for norm in of_hidden)]
        return select_targets(norms, self.target_modules, "ln_tuning_target_modules", "norm")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> TunedNorm:
        assert isinstance(base, RMSNorm | LayerNorm)
        return TunedNorm(base)

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LNTuningConfig:
        refuse_unread_fields(fields, {"target_modules"})
        return cls(target_modules=targets_from_peft(fields))


class TunedNorm(WeightAdapter):
    """Normalization layer with a trained scale that replaces the base's scale.

    Args:
        base: norm to adapt.
    """

    base: RMSNorm | LayerNorm

    def __init__(self, base: RMSNorm | LayerNorm) -> None:
        super().__init__(base)
        scale = base.weight.astype("float32").numpy() if has_values(base) else np.ones(base.weight.shape, np.float32)
        self.ln_tuning_layers = Factor(scale, base.weight.dtype)

    @property
    def weight(self) -> paddle.Tensor:
        """Current scale [D]: the trained scale, or the base's scale while the adapter is disabled."""
        return self.ln_tuning_layers.weight if self.enabled else self.base.weight

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.base.normalize(x, self.weight)

    def forward_add(self, x: paddle.Tensor, addend: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return `x + addend` and its normalization, both [..., D]; only for RMS norms."""
        assert isinstance(self.base, RMSNorm), "forward_add requires an RMSNorm"
        return self.base.normalize_sum(x, addend, self.weight)

    def merged_weight(self) -> paddle.Tensor:
        """Return the trained scale, float32 [D]."""
        return self.ln_tuning_layers.weight.astype("float32")
