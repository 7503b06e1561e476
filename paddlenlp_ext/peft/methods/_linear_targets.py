"""Options of the methods that adapt linear layers of the user's choice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.inject import linear_names, select_targets


@dataclass(kw_only=True)
class LinearTargetsConfig(PeftConfig):
    """Base of the options of a method that adapts linear layers, by default all of the decoder.

    Class attributes:
        targets_key: JSON key of `target_modules`, for errors.
    """

    targets_key: ClassVar[str]

    target_modules: tuple[str, ...] | None = option(
        None, help="linear layers to adapt, as name suffixes or regular expressions; unset: all but lm_head"
    )

    def targets(self, model: TrainableModel) -> list[str]:
        return select_targets(linear_names(model), self.target_modules, self.targets_key)

    def warm_start(self, stored: PeftConfig) -> PeftConfig:
        assert isinstance(stored, type(self))
        own = {name: getattr(self, name) for name in ("path", "dropout") if hasattr(self, name)}
        return dataclasses.replace(stored, **own)
