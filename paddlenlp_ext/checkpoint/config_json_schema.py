"""Types and ranges of the keys of config.json that the decoders read.

A key is checked wherever it stands, whichever family reads it. Keys that are not listed are read by no decoder.
Relations between keys, such as heads that divide the hidden size, are checked by `DecoderConfig`.
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
    one_of,
    whole,
)

_FLAG_OR_NULL = FLAG.or_null()
_LAYER = whole(0, 1024)
_ID = whole(-1, 2**31 - 1)  # -1: no token, in the first files of Llama
_POSITIVE, _SHARE = number(above=0), number(minimum=0, maximum=1)
_FACTOR = number(minimum=1e-6, maximum=1e6)
_BASE = number(above=1).or_null()  # the frequencies are powers of its logarithm
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

ROPE_KEYS: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), TEXT.or_null()),
    "rope_theta": _BASE,
    "partial_rotary_factor": number(above=0, maximum=1).or_null(),
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
        _FACTOR.or_null(),
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), number(minimum=0, maximum=1e3).or_null()),
    "alpha": number(minimum=0, maximum=1e6).or_null(),
    "original_max_position_embeddings": number(minimum=2, maximum=2**31).or_null(),
    **dict.fromkeys(("short_factor", "long_factor"), list_of(_FACTOR).or_null()),
    "truncate": _FLAG_OR_NULL,
    **dict.fromkeys(("full_attention", "sliding_attention"), OBJECT.or_null()),
}
"""Keys of `rope_scaling` and `rope_parameters`, of all layers or of a layer type."""

QUANTIZATION_KEYS: Mapping[str, Kind] = {
    **dict.fromkeys(("quant_method", "bnb_4bit_quant_type"), TEXT),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_use_double_quant"), _FLAG_OR_NULL),
    "paddlenlp_ext": OBJECT,
}
"""Keys of `quantization_config`."""

QUANTIZATION_OPTIONS: Mapping[str, Kind] = {
    "algo": either(TEXT, OBJECT),
    **dict.fromkeys(("block_size", "double_quant_block_size"), whole(2, 2**20)),
    "double_quant": FLAG,
    "group_size": whole(2, 2**20).or_null(),
}
"""Keys of this package in `quantization_config`."""

KEYS: Mapping[str, Kind] = {
    "model_type": TEXT,
    "architectures": list_of(TEXT).or_null(),
    **dict.fromkeys(("dtype", "torch_dtype"), one_of(*_DTYPES, *(f"torch.{n}" for n in _DTYPES), "auto").or_null()),
    # sizes: 0 and null are for models that lack the part; `DecoderConfig` refuses them where the decoder has it
    "num_hidden_layers": whole(0, 1024).or_null(),
    "vocab_size": whole(0, 10**8).or_null(),
    **dict.fromkeys(("hidden_size", "q_lora_rank", "kv_lora_rank"), whole(0, 2**20).or_null()),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), whole(0, 2**24).or_null()
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts"),
            *("num_experts_per_tok", "n_routed_experts", "moe_num_experts", "moe_k", "n_group", "topk_group"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        ),
        whole(0, 2**16).or_null(),
    ),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), whole(0, 1024).or_null()),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), whole(0, 2**31).or_null()),
    "original_max_position_embeddings": ROPE_KEYS["original_max_position_embeddings"],
    # layers
    **dict.fromkeys(
        (
            *("sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step", "moe_layer_interval"),
            *("first_k_dense_replace", "num_nextn_predict_layers"),
        ),
        _LAYER.or_null(),
    ),
    "moe_layer_freq": either(_LAYER, list_of(_LAYER)).or_null(),
    "max_window_layers": _LAYER.or_null(),
    "moe_layer_start_index": _LAYER,
    "moe_layer_end_index": whole(-1, 1024),
    "mlp_only_layers": list_of(_LAYER).or_null(),
    "no_rope_layers": list_of(either(whole(0, 1), FLAG)).or_null(),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), list_of(TEXT).or_null()),
    # numbers
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "moe_norm_min"), _SHARE),
    "initializer_range": number(minimum=0, maximum=1e3),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _BASE),
    "partial_rotary_factor": ROPE_KEYS["partial_rotary_factor"],
    **dict.fromkeys(
        (
            *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
            *("query_pre_attn_scalar", "scale_emb", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit"),
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(("scale_depth", "dim_model_base"), _POSITIVE.or_null()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), number().or_null()),
    **dict.fromkeys(
        ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise", "router_aux_loss_coef"),
        number(minimum=0, maximum=1e3).or_null(),
    ),
    # options
    **dict.fromkeys(
        (
            *("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "tie_word_embeddings", "use_sliding_window"),
            *("use_qk_norm", "rope_interleave", "norm_topk_prob", "output_router_logits"),
            "use_bidirectional_attention",
        ),
        _FLAG_OR_NULL,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation"), TEXT.or_null()),
    **dict.fromkeys(("topk_method", "scoring_func"), TEXT.or_null()),
    # tokens and labels
    "eos_token_id": either(_ID, list_of(_ID)).or_null(),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _ID.or_null()),
    "num_labels": whole(1, 10**6).or_null(),
    "id2label": OBJECT.or_null(),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), OBJECT.or_null()),
}
"""Keys of config.json that some family, a reward model, a tokenizer or a loader reads."""


GENERATION_KEYS: Mapping[str, Kind] = {
    **{key: KEYS[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id")},
    **dict.fromkeys(("do_sample", "use_cache"), _FLAG_OR_NULL),
    "temperature": number(minimum=0).or_null(),
    "length_penalty": number().or_null(),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), _SHARE.or_null()),
    "repetition_penalty": _POSITIVE.or_null(),
    **dict.fromkeys(
        (
            *("top_k", "max_length", "min_length", "max_new_tokens", "min_new_tokens", "num_beams"),
            *("num_beam_groups", "num_return_sequences", "no_repeat_ngram_size"),
        ),
        whole(0, 2**31).or_null(),
    ),
}
"""Keys of generation_config.json; the sampling options are written again with a saved model."""


def check_config_values(config: Mapping[str, Any], origin: str | None = None) -> None:
    """Check the types and ranges of the keys of a config.json dict.

    Args:
        config: contents of the file.
        origin: path of the model, for the message; None if there is none.

    Raises:
        ValueError: a value is not allowed; the message names the file, the key, the value and what is allowed.
    """
    try:
        check_values(config, KEYS, "config.json")
        for name in ("rope_scaling", "rope_parameters"):
            settings = config.get(name) or {}
            for kind, own in settings.items():
                if isinstance(own, Mapping):
                    check_values(own, ROPE_KEYS, f"{name}.{kind} of config.json")
            check_values(settings, ROPE_KEYS, f"{name} of config.json")
        quantization = config.get("quantization_config") or {}
        check_values(quantization, QUANTIZATION_KEYS, "quantization_config of config.json")
        own = quantization.get("paddlenlp_ext") or {}
        check_values(own, QUANTIZATION_OPTIONS, "quantization_config.paddlenlp_ext of config.json")
    except ValueError as error:
        if origin is None:
            raise
        raise ValueError(f"{origin}: {error}") from error
