"""What LoKr and LoHa share in adapter_config.json, where Hugging Face PEFT names their fields alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle import nn

from paddlenlp_ext.peft.config import refuse_unread_fields
from paddlenlp_ext.peft.layer import adapter_layers
from paddlenlp_ext.peft.targets import shortest_targets, targets_from_peft

# How an adapter began and what was dropped while it was trained change none of its numbers; the convolutions'
# decomposition changes no linear.
_WITHOUT_EFFECT = {"init_weights", "rank_dropout", "rank_dropout_scale", "module_dropout", "use_effective_conv2d"}
_READ = {"r", "alpha", "rank_pattern", "alpha_pattern", "target_modules", "layers_to_transform", "layers_pattern"}


def to_lycoris(config: Any, model: nn.Layer) -> dict[str, Any]:
    """The shared fields of a config with `rank`, `alpha` and their patterns."""
    return {
        "r": config.rank,
        "alpha": config.alpha,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
        "rank_dropout": 0.0,
        "module_dropout": 0.0,
        "init_weights": True,
        "modules_to_save": None,
    }


def from_lycoris(fields: Mapping[str, Any], also_read: set[str]) -> dict[str, Any]:
    """The shared arguments of the config; `also_read` are the method's own fields.

    Raises:
        ValueError: a field asks for something that is not available here.
    """
    refuse_unread_fields(fields, _READ | _WITHOUT_EFFECT | also_read)
    return {
        "rank": fields.get("r", 8),
        "alpha": fields.get("alpha", 8),
        "rank_pattern": fields.get("rank_pattern") or {},
        "alpha_pattern": fields.get("alpha_pattern") or {},
        "target_modules": targets_from_peft(fields),
    }
