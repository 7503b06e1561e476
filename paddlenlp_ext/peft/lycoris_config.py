"""Options and file fields that LoKr and LoHa share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import refuse_unread_fields
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.linear_method_config import LayerRanksConfig
from paddlenlp_ext.peft.target_modules import by_pattern, shortest_targets, targets_from_peft

# Initialization and dropout do not affect the outputs of a stored adapter. The decomposition of convolutions does not
# affect linear layers.
_WITHOUT_EFFECT = {"init_weights", "rank_dropout", "rank_dropout_scale", "module_dropout", "use_effective_conv2d"}
_READ = {"r", "alpha", "rank_pattern", "alpha_pattern", "target_modules", "layers_to_transform", "layers_pattern"}


@dataclass(kw_only=True)
class LycorisConfig(LayerRanksConfig):
    """Options that LoKr and LoHa share; a subclass declares `r` and `alpha`.

    Class attributes:
        own_fields: options specific to the subclass, with the same names in adapter_config.json.
    """

    own_fields: ClassVar[tuple[str, ...]] = ()

    alpha: float | None

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return the rank r and the scale s of the layer `name`."""
        rank = int(by_pattern(self.rank_pattern, name, self.r))
        assert self.alpha is not None
        return rank, by_pattern(self.alpha_pattern, name, self.alpha) / rank

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "alpha": self.alpha,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "rank_dropout": 0.0,
            "module_dropout": 0.0,
            "init_weights": True,
            "modules_to_save": None,
            **{name: getattr(self, name) for name in self.own_fields},
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LycorisConfig:
        refuse_unread_fields(fields, _READ | _WITHOUT_EFFECT | set(cls.own_fields))
        return cls(
            r=fields.get("r", 8),
            alpha=fields.get("alpha", 8),
            rank_pattern=fields.get("rank_pattern") or {},
            alpha_pattern=fields.get("alpha_pattern") or {},
            target_modules=targets_from_peft(fields),
            **{name: fields[name] for name in cls.own_fields if name in fields},
        )
