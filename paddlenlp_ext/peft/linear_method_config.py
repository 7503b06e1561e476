"""Base configs of methods that adapt linear layers: options for targets, and for ranks per layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.target_modules import linear_names, select_targets


@dataclass(kw_only=True)
class LinearTargetsConfig(PeftConfig):
    """Options of a method that adapts linear layers; by default, all linear layers of the decoder.

    Class attributes:
        targets_key: JSON key of `target_modules`, for error messages.
    """

    targets_key: ClassVar[str]

    target_modules: tuple[str, ...] | None = option(
        None, help="linear layers to adapt, as name suffixes or regular expressions; unset: all but lm_head"
    )

    def targets(self, model: TrainableModel) -> list[str]:
        return select_targets(linear_names(model), self.target_modules, self.targets_key)

    def warm_start(self, stored: PeftConfig) -> PeftConfig:
        assert isinstance(stored, type(self))
        fields = [field.name for field in dataclasses.fields(self)]
        return stored.replace(**{name: getattr(self, name) for name in fields if name.endswith(("path", "dropout"))})


@dataclass(kw_only=True)
class LayerRanksConfig(LinearTargetsConfig):
    """Options of a method whose rank and alpha may differ by layer; a subclass declares the fields `r` and alpha.

    Class attributes:
        alpha_option: name of the field for alpha.
    """

    alpha_option: ClassVar[str] = "alpha"

    r: int
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Name suffix or regular expression -> rank of the matching layers, as in Hugging Face PEFT."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Name suffix or regular expression -> alpha of the matching layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_option("r", *self.rank_pattern.values())
        self.check_option(self.alpha_option, *self.alpha_pattern.values())
