"""Base configs of methods that adapt linear layers: options for the targets, and for the rank of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.target_modules import ALL_LINEAR, in_layers, linear_names, select_targets
from paddlenlp_ext.utils.layer_name_patterns import check_pattern


def rank_option(default: int, key: str, help: str) -> Any:
    """Declare the option `r` of a method, with the JSON key `key`."""
    return option(default, help=help, minimum=1, maximum=65536, arguments=("rank",), key=key)


def dropout_option(key: str) -> Any:
    """Declare the option for dropout on the adapter's input, with the JSON key `key`."""
    help = "dropout on the adapter's input during training"
    return option(0.0, help=help, minimum=0, below=1, arguments=("dropout",), key=key)


@dataclass(kw_only=True)
class LinearTargetsConfig(PeftConfig):
    """Options of a method that adapts linear layers. By default, all linear layers of the decoder are adapted.

    Class attributes:
        targets_key: JSON key of `target_modules`, for error messages.
    """

    targets_key: ClassVar[str]

    target_modules: tuple[str, ...] | None = option(
        None, help="linear layers to adapt, as name suffixes or regular expressions; unset: all but lm_head"
    )

    layers_to_transform: int | Sequence[int] | None = field(default=None, repr=False, compare=False)
    """Indices of the decoder layers to adapt. The constructor converts them to entries of `target_modules`."""
    layers_pattern: str | Sequence[str] | None = field(default=None, repr=False, compare=False)
    """Names of layer lists, such as "layers", to which `layers_to_transform` refers; None: all lists."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_modules == (ALL_LINEAR,):
            self.target_modules = None
        self.target_modules = in_layers(self.target_modules, self.layers_to_transform, self.layers_pattern)
        self.layers_to_transform = self.layers_pattern = None

    def targets(self, model: TrainableModel) -> list[str]:
        return select_targets(linear_names(model), self.target_modules, self.targets_key)


@dataclass(kw_only=True)
class LayerRanksConfig(LinearTargetsConfig):
    """Options of a method with a rank and an alpha for each layer; a subclass declares the fields `r` and alpha.

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
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, key):
                check_pattern(pattern, f"{type(self).__name__}.{key}")
        self.check_option("r", *self.rank_pattern.values())
        self.check_option(self.alpha_option, *self.alpha_pattern.values())
