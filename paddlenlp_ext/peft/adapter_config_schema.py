"""Types and ranges of the fields of adapter config files.

A field is checked wherever it stands, whichever method reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.utils.json_schema import (
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
_SIZE, _COUNT, _SEED = whole(0, 2**20), whole(0, 2**31), whole(0, 2**63 - 1)
_RANK = whole(0, 65536)

FLAGS_BY_LAYER = object_of(list_of(FLAG)).or_null()
"""AdaLoRA's `rank_pattern`: a flag for each rank."""

FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules", "target_parameters"), _NAMES),
    **dict.fromkeys(("layers_pattern", "feedforward_modules", "trainable_modules"), _NAMES),
    **dict.fromkeys(
        ("bias", "base_model_name_or_path", "encoder_reparameterization_type", "task_type"), TEXT.or_null()
    ),
    "peft_type": TEXT.or_null(),
    "layers_to_transform": either(_LAYER, list_of(_LAYER)).or_null(),
    **dict.fromkeys(("init_lora_weights", "init_weights", "init_ia3_weights"), either(FLAG, TEXT).or_null()),
    "rank_pattern": object_of(either(whole(1, 65536), list_of(FLAG))).or_null(),  # AdaLoRA checks its own again
    "alpha_pattern": object_of(number(above=0)).or_null(),
    "trainable_token_indices": either(_TOKENS, object_of(_TOKENS)).or_null(),
    "token_indices": either(_TOKENS, object_of(_TOKENS)).or_null(),
    # ranks, sizes and counts; PEFT's 0 stands for a size that follows from another one
    "r": _RANK,
    **dict.fromkeys(("init_r", "target_r", "mini_r", "rank", "size", "num_virtual_tokens"), _RANK.or_null()),
    **dict.fromkeys(("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "oft_block_size"), _SIZE),
    **dict.fromkeys(("encoder_hidden_size", "token_dim"), _SIZE.or_null()),
    **dict.fromkeys(
        (
            *("encoder_num_layers", "num_layers", "num_attention_heads", "num_transformer_submodules"),
            "num_cayley_neumann_terms",
        ),
        whole(0, 65536).or_null(),
    ),
    "decompose_factor": whole(-1, 2**20),
    **dict.fromkeys(("tinit", "tfinal", "deltaT", "total_step"), _COUNT.or_null()),
    **dict.fromkeys(("projection_prng_key", "random_seed"), _SEED.or_null()),
    # numbers
    **dict.fromkeys(("lora_alpha", "alpha"), number(above=0).or_null()),
    **dict.fromkeys(
        (
            *("dropout", "lora_dropout", "hira_dropout", "boft_dropout", "miss_dropout", "vera_dropout"),
            *("encoder_dropout", "prefix_dropout", "rank_dropout", "module_dropout"),
        ),
        number(minimum=0, maximum=1).or_null(),
    ),
    **dict.fromkeys(
        (
            *("beta1", "beta2", "orth_reg_weight", "sparse_lambda", "penalty", "gate_scale", "scale", "d_initial"),
            "eps",
        ),
        number().or_null(),
    ),
    # options
    **dict.fromkeys(
        (
            *("use_rslora", "use_dora", "use_mora", "lora_use_mixer", "lora_bias", "fan_in_fan_out", "block_share"),
            *("coft", "use_cayley_neumann", "decompose_both", "rank_dropout_scale", "use_effective_conv2d"),
            *("use_qalora", "apply_GS", "add_bias", "prefix_projection", "save_projection", "ensure_weight_tying"),
            "over_residual",
        ),
        FLAG.or_null(),
    ),
    **dict.fromkeys(
        (
            *("where", "kind", "mora_folding", "mask_type"),
            *("peft_version", "prompt_tuning_init"),
        ),
        TEXT.or_null(),
    ),
    **dict.fromkeys(("position", "intervention_type", "act_fn", "activation"), TEXT),
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
