"""Types of the fields of adapter config files that are converted before they become typed options of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.utils.value_kinds import (
    FLAG,
    OBJECT,
    TEXT,
    Kind,
    check_values,
    either,
    list_of,
    number,
    object_of,
    whole,
)

_NAMES = either(TEXT, list_of(TEXT)).or_null()
_LAYER = whole(0, 1024)
_TOKENS = list_of(whole(0, 2**31))

FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules", "target_parameters"), _NAMES),
    **dict.fromkeys(("layers_pattern", "feedforward_modules", "trainable_modules"), _NAMES),
    **dict.fromkeys(
        ("bias", "base_model_name_or_path", "encoder_reparameterization_type", "task_type"), TEXT.or_null()
    ),
    "peft_type": TEXT.or_null(),
    "layers_to_transform": either(_LAYER, list_of(_LAYER)).or_null(),
    **dict.fromkeys(("init_lora_weights", "init_weights", "init_ia3_weights"), either(FLAG, TEXT).or_null()),
    # AdaLoRA stores a flag per rank
    "rank_pattern": object_of(either(whole(1, 65536), list_of(FLAG))).or_null(),
    "alpha_pattern": object_of(number(above=0)).or_null(),
    "trainable_token_indices": either(_TOKENS, object_of(_TOKENS)).or_null(),
    "token_indices": either(_TOKENS, object_of(_TOKENS)).or_null(),
    "ensure_weight_tying": FLAG.or_null(),
    **dict.fromkeys(
        ("split_layers", "fields", "paddlenlp_ext", "base_config_overrides", "base_quantization"), OBJECT.or_null()
    ),
}
"""Fields of any method -> kinds."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields of an adapter config file, and those of the objects in which this package adds fields.

    Raises:
        ValueError: a field has a value of another type.
    """
    check_values(fields, FIELDS, "the adapter's config")
    for name in ("split_layers", "paddlenlp_ext"):
        check_values(fields.get(name) or {}, FIELDS, f"{name} of the adapter's config")
    check_values((fields.get("split_layers") or {}).get("fields") or {}, FIELDS, "split_layers of the adapter's config")
