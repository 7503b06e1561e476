"""Options and file fields that LoKr and LoHa share: rank and alpha per layer, with Hugging Face PEFT's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import refuse_unread_fields
from paddlenlp_ext.peft.inject import by_pattern, shortest_targets, targets_from_peft
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.linear_method_config import LayerRanksConfig

# Initialization and dropout do not affect a stored adapter; the decomposition of convolutions does not affect linears.
_WITHOUT_EFFECT = {"init_weights", "rank_dropout", "rank_dropout_scale", "module_dropout", "use_effective_conv2d"}
_READ = {"r", "alpha", "rank_pattern", "alpha_pattern", "target_modules", "layers_to_transform", "layers_pattern"}


@dataclass(kw_only=True)
class LycorisConfig(LayerRanksConfig):
    """Base of the options of LoKr and LoHa; a subclass declares `rank` and `alpha`.

    Class attributes:
        own_fields: field of adapter_config.json specific to the method -> its option.
    """

    own_fields: ClassVar[Mapping[str, str]] = {}

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return rank r and scaling s of the layer `name`."""
        rank = int(by_pattern(self.rank_pattern, name, self.rank))
        assert self.alpha is not None
        return rank, by_pattern(self.alpha_pattern, name, self.alpha) / rank

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.rank,
            "alpha": self.alpha,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "rank_dropout": 0.0,
            "module_dropout": 0.0,
            "init_weights": True,
            "modules_to_save": None,
            **{own: getattr(self, option) for own, option in self.own_fields.items()},
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LycorisConfig:
        refuse_unread_fields(fields, _READ | _WITHOUT_EFFECT | cls.own_fields.keys())
        return cls(
            rank=fields.get("r", 8),
            alpha=fields.get("alpha", 8),
            rank_pattern=fields.get("rank_pattern") or {},
            alpha_pattern=fields.get("alpha_pattern") or {},
            target_modules=targets_from_peft(fields),
            **{option: fields[own] for own, option in cls.own_fields.items() if own in fields},
        )
