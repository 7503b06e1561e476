"""Types and ranges of the keys of config.json and generation_config.json.

Each key is checked even if the family of the model does not use the key. Keys that no family uses are not listed.
`DecoderConfig` checks constraints between keys: for example, the number of heads must divide the hidden size.
"""

from __future__ import annotations

import math
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
    one_of,
    whole,
)

_LAYER = whole(0, 1024)
_COUNT, _WIDTH = whole(0, 2**16), whole(0, 2**24)
_TOKEN = whole(-1, 2**31 - 1)  # -1: no token, in the first Llama checkpoints
_POSITIVE, _FRACTION = number(above=0), number(minimum=0, maximum=1)
_FACTOR = number(minimum=1e-6, maximum=1e6)
_ROPE_BASE = number(above=1).or_null()  # with base 1, all rotary frequencies would be equal
_POSITIONS = number(minimum=2, maximum=2**31).or_null()
_INFINITY = Kind("infinity", lambda value: value in (math.inf, {"__float__": "Infinity"}))
_ROTARY_FRACTION = number(above=0, maximum=1).or_null()
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

ROPE_KEYS: Mapping[str, Kind] = kinds_by_key(
    (TEXT.or_null(), "rope_type type"),
    (_ROPE_BASE, "rope_theta"),
    (_ROTARY_FRACTION, "partial_rotary_factor"),
    (_FACTOR.or_null(), "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"),
    (number(minimum=0, maximum=1e3).or_null(), "mscale mscale_all_dim"),
    (number(minimum=0, maximum=1e6).or_null(), "alpha"),
    (_POSITIONS, "original_max_position_embeddings"),
    (list_of(_FACTOR).or_null(), "short_factor long_factor"),
    (FLAG.or_null(), "truncate"),
    (OBJECT.or_null(), "full_attention sliding_attention"),
    (number(minimum=0, maximum=1e3).or_null(), "llama_4_scaling_beta"),
)
"""Keys of `rope_scaling` and `rope_parameters`, which apply to all layers or to one layer type."""

QUANTIZATION_KEYS: Mapping[str, Kind] = kinds_by_key(
    (TEXT, "quant_method bnb_4bit_quant_type"),
    (FLAG.or_null(), "load_in_4bit bnb_4bit_use_double_quant"),
    (OBJECT, "paddlenlp_ext"),
)
"""Keys of `quantization_config`."""

QUANTIZATION_OPTIONS: Mapping[str, Kind] = kinds_by_key(
    (either(TEXT, OBJECT), "algo"),
    (whole(2, 2**20), "block_size double_quant_block_size"),
    (FLAG, "double_quant"),
    (whole(2, 2**20).or_null(), "group_size"),
)
"""Keys of `quantization_config.paddlenlp_ext`, which only this package writes."""

_TOKEN_KEYS = (
    (either(_TOKEN, list_of(_TOKEN)).or_null(), "eos_token_id"),
    (_TOKEN.or_null(), "bos_token_id pad_token_id"),
)
KEYS: Mapping[str, Kind] = kinds_by_key(
    (TEXT, "model_type"),
    (list_of(TEXT).or_null(), "architectures"),
    (one_of(*_DTYPES, *(f"torch.{name}" for name in _DTYPES), "auto").or_null(), "dtype torch_dtype"),
    # A size of 0 or null means that the model lacks the component; `DecoderConfig` rejects 0 and null for required
    # components.
    (whole(0, 1024).or_null(), "num_hidden_layers n_shared_experts moe_num_shared_experts num_shared_experts"),
    (whole(0, 10**8).or_null(), "vocab_size vocab_size_per_layer_input"),
    (whole(0, 2**20).or_null(), "hidden_size q_lora_rank kv_lora_rank"),
    (
        whole(0, 2**24).or_null(),
        "intermediate_size shared_expert_intermediate_size shared_intermediate_size block_ff_dim "
        "moe_shared_expert_intermediate_size moe_latent_size",
    ),
    (either(_WIDTH, list_of(_WIDTH)).or_null(), "moe_intermediate_size"),
    (
        whole(0, 2**16).or_null(),
        "num_attention_heads num_key_value_heads head_dim num_local_experts num_experts_per_tok "
        "n_routed_experts moe_num_experts moe_k n_group topk_group qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "kv_channels global_head_dim num_global_key_value_heads top_k_experts hidden_size_per_layer_input "
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
        "linear_num_heads linear_head_dim num_experts_per_token num_expert_group "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_expand "
        "mamba_num_heads mamba_head_dim n_groups ssm_state_size rotary_dim mamba_d_ssm",
    ),
    (either(_COUNT, list_of(_COUNT)).or_null(), "num_experts moe_topk num_shared_expert"),
    (whole(0, 2**31).or_null(), "max_position_embeddings sliding_window seq_length model_max_length"),
    (_POSITIONS, "original_max_position_embeddings"),
    # Layers.
    (
        _LAYER.or_null(),
        "no_rope_layer_interval decoder_sparse_step moe_layer_interval first_k_dense_replace "
        "num_nextn_predict_layers max_window_layers num_dense_layers global_attn_every_n_layers num_kv_shared_layers "
        "full_attention_interval",
    ),
    (either(_LAYER, TEXT).or_null(), "sliding_window_pattern"),
    (list_of(either(number(above=1), whole(0, 0))).or_null(), "layer_rope_theta"),
    (either(_LAYER, list_of(_LAYER)).or_null(), "moe_layer_freq"),
    (list_of(_LAYER).or_null(), "full_attn_idxs"),
    (whole(1, 64), "conv_L_cache linear_conv_kernel_dim mamba_d_conv conv_kernel"),
    (either(whole(1, 2**16), one_of("auto")).or_null(), "mamba_d_head"),
    (list_of(either(number(minimum=0), _INFINITY)).or_null(), "time_step_limit"),
    (whole(1, 2**20).or_null(), "block_multiple_of"),
    (_POSITIVE.or_null(), "block_ffn_dim_multiplier"),
    (_LAYER, "moe_layer_start_index"),
    (whole(-1, 1024), "moe_layer_end_index"),
    (list_of(_LAYER).or_null(), "mlp_only_layers"),
    (list_of(either(whole(0, 1), FLAG)).or_null(), "no_rope_layers"),
    (list_of(TEXT).or_null(), "layer_types mlp_layer_types layers_block_type"),
    # Floating-point values.
    (_FRACTION, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps moe_norm_min"),
    (number(minimum=0, maximum=1e3), "initializer_range"),
    (_ROPE_BASE, "rope_theta rope_local_base_freq rotary_emb_base"),
    (_ROTARY_FRACTION, "partial_rotary_factor rotary_pct"),
    (
        _POSITIVE,
        "attention_multiplier embedding_multiplier residual_multiplier logits_scaling logit_scale "
        "query_pre_attn_scalar scale_emb routed_scaling_factor swiglu_alpha swiglu_limit route_scale "
        "lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier ssm_in_multiplier "
        "ssm_out_multiplier",
    ),
    (_POSITIVE.or_null(), "scale_depth dim_model_base"),
    (list_of(_POSITIVE).or_null(), "mlp_multipliers ssm_multipliers"),
    (number().or_null(), "attn_logit_softcapping final_logit_softcapping"),
    (
        number(minimum=0, maximum=1e3).or_null(),
        "attention_dropout resid_pdrop embd_pdrop router_jitter_noise router_aux_loss_coef "
        "attn_dropout_prob emb_dropout_prob",
    ),
    # Options.
    (
        FLAG.or_null(),
        "attention_bias attention_out_bias mlp_bias qkv_bias use_bias tie_word_embeddings use_sliding_window "
        "use_qk_norm rope_interleave mup_enabled has_rope conv_bias use_expert_bias block_auto_adjust_ff_dim "
        "tie_embedding route_norm "
        "norm_topk_prob output_router_logits no_bias use_logn_attn use_dynamic_ntk attention_k_eq_v enable_moe_block "
        "use_double_wide_mlp mamba_conv_bias mamba_proj_bias linear_allow_neg_eigval use_conv_bias projectors_bias "
        "mamba_rms_norm mamba_norm_before_gate moe_renormalize mla_use_nope",
    ),
    (either(FLAG, TEXT).or_null(), "use_bidirectional_attention"),
    (
        TEXT.or_null(),
        "hidden_act hidden_activation topk_method scoring_func position_embedding_type mlp_hidden_act "
        "mamba_hidden_act hybrid_override_pattern moe_router_activation_func",
    ),
    (number(minimum=0, maximum=1e3).or_null(), "query_scale_beta"),
    (number(minimum=0, maximum=1e3), "time_step_min"),
    # Token ids and labels.
    *_TOKEN_KEYS,
    (whole(1, 10**6).or_null(), "num_labels"),
    (OBJECT.or_null(), "id2label rope_scaling rope_parameters quantization_config per_layer_config linear_attn_config"),
)
"""Keys of config.json that a model family, a reward model, a tokenizer or a loader uses."""

GENERATION_KEYS: Mapping[str, Kind] = kinds_by_key(
    *_TOKEN_KEYS,
    (FLAG.or_null(), "do_sample use_cache"),
    (number(minimum=0).or_null(), "temperature"),
    (number().or_null(), "length_penalty"),
    (_FRACTION.or_null(), "top_p min_p typical_p"),
    (_POSITIVE.or_null(), "repetition_penalty"),
    (
        whole(0, 2**31).or_null(),
        "top_k max_length min_length max_new_tokens min_new_tokens num_beams num_beam_groups num_return_sequences "
        "no_repeat_ngram_size",
    ),
)
"""Keys of generation_config.json, including sampling options, which are kept when a model is saved."""


def check_config_values(config: Mapping[str, Any], origin: str | None = None) -> None:
    """Check the types and ranges of the keys of a config.json dict.

    Args:
        config: contents of the file.
        origin: path of the model for the error message; None for a config that was not read from a file.

    Raises:
        ValueError: a value is invalid; the message names the file, the key, the value and the allowed values.
    """
    try:
        check_values(config, KEYS, "config.json")
        for name in ("rope_scaling", "rope_parameters"):
            settings = config.get(name) or {}
            for layer_type, of_layer_type in settings.items():
                if isinstance(of_layer_type, Mapping):
                    check_values(of_layer_type, ROPE_KEYS, f"{name}.{layer_type} of config.json")
            check_values(settings, ROPE_KEYS, f"{name} of config.json")
        quantization = config.get("quantization_config") or {}
        check_values(quantization, QUANTIZATION_KEYS, "quantization_config of config.json")
        options = quantization.get("paddlenlp_ext") or {}
        check_values(options, QUANTIZATION_OPTIONS, "quantization_config.paddlenlp_ext of config.json")
    except ValueError as error:
        if origin is None:
            raise
        raise ValueError(f"{origin}: {error}") from error
