"""Types and ranges of the fields in adapter config files, for all methods."""

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
    kinds_by_key,
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
"""AdaLoRA's `rank_pattern`: layer -> a flag for each rank."""

FIELDS: Mapping[str, Kind] = kinds_by_key(
    (_NAMES, "target_modules modules_to_save exclude_modules target_parameters"),
    (_NAMES, "layers_pattern feedforward_modules trainable_modules"),
    (TEXT.or_null(), "bias base_model_name_or_path encoder_reparameterization_type task_type peft_type"),
    (either(_LAYER, list_of(_LAYER)).or_null(), "layers_to_transform"),
    (either(FLAG, TEXT).or_null(), "init_lora_weights init_weights init_ia3_weights"),
    (
        object_of(either(whole(1, 65536), list_of(FLAG))).or_null(),
        "rank_pattern",
    ),  # methods/adalora.py checks AdaLoRA's flags
    (object_of(number(above=0)).or_null(), "alpha_pattern"),
    (either(_TOKENS, object_of(_TOKENS)).or_null(), "trainable_token_indices token_indices"),
    # ranks, sizes and counts; PEFT writes 0 for a block size or a number of blocks that is not set
    (_RANK, "r"),
    (_RANK.or_null(), "init_r target_r mini_r rank size num_virtual_tokens"),
    (_SIZE, "boft_block_size boft_block_num boft_n_butterfly_factor oft_block_size"),
    (_SIZE.or_null(), "encoder_hidden_size token_dim"),
    (
        whole(0, 65536).or_null(),
        "encoder_num_layers num_layers num_attention_heads num_transformer_submodules num_cayley_neumann_terms",
    ),
    (whole(-1, 2**20), "decompose_factor"),
    (_COUNT.or_null(), "tinit tfinal deltaT total_step"),
    (_SEED.or_null(), "projection_prng_key random_seed"),
    # floating-point numbers
    (number(above=0).or_null(), "lora_alpha alpha"),
    (
        number(minimum=0, maximum=1).or_null(),
        "dropout lora_dropout hira_dropout boft_dropout miss_dropout vera_dropout encoder_dropout prefix_dropout "
        "rank_dropout module_dropout",
    ),
    (number().or_null(), "beta1 beta2 orth_reg_weight sparse_lambda penalty gate_scale scale d_initial eps"),
    # options
    (
        FLAG.or_null(),
        "use_rslora use_dora use_mora lora_use_mixer lora_bias fan_in_fan_out block_share coft use_cayley_neumann "
        "decompose_both rank_dropout_scale use_effective_conv2d use_qalora apply_GS add_bias prefix_projection "
        "save_projection ensure_weight_tying over_residual",
    ),
    (TEXT.or_null(), "where kind mora_folding mask_type peft_version prompt_tuning_init"),
    (TEXT, "position intervention_type act_fn activation"),
    (OBJECT.or_null(), "split_layers fields paddlenlp_ext base_config_overrides base_quantization"),
)
"""Field of adapter_config.json -> type and range of its value; has the fields of all methods."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields of an adapter config file, and of the nested objects that this package adds.

    Raises:
        ValueError: the value of a field has the wrong type or is out of range.
    """
    check_values(fields, FIELDS, "the adapter's config")
    for name in ("split_layers", "paddlenlp_ext"):
        check_values(fields.get(name) or {}, FIELDS, f"{name} of the adapter's config")
    check_values((fields.get("split_layers") or {}).get("fields") or {}, FIELDS, "split_layers of the adapter's config")
