"""Types and ranges of the keys of config.json that the decoders read.

A key is checked wherever it stands, whichever family reads it. Keys that are not listed are read by no decoder.
Relations between keys, such as heads that divide the hidden size, are checked by `DecoderConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Allowed values of a key, in words and as a predicate."""

    words: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """Return the kind that also accepts null."""
        return Kind(f"{self.words}, or null", lambda value: value is None or self.accepts(value))


def whole(minimum: int, maximum: int) -> Kind:
    """Return the kind of whole numbers in a range."""
    words = f"an integer from {minimum} to {maximum}"
    return Kind(words, lambda value: type(value) is int and minimum <= value <= maximum)


def number(*, above: float = -math.inf, minimum: float = -math.inf, maximum: float = 1e12) -> Kind:
    """Return the kind of finite numbers in a range."""
    lower = f"above {above:g}" if above > -math.inf else f"from {minimum:g}" if minimum > -math.inf else ""
    bounds = f"{lower} up to {maximum:g}" if lower else f"of at most {maximum:g}"
    return Kind(
        f"a number {bounds}",
        # A comparison with NaN is false, and one with infinity or a whole number of 300 digits is exact.
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and above < value <= maximum
            and value >= max(minimum, -maximum)
        ),
    )


def list_of(kind: Kind) -> Kind:
    """Return the kind of lists whose entries have one kind."""
    return Kind(
        f"a list of which each entry is {kind.words}",
        lambda value: isinstance(value, list) and all(map(kind.accepts, value)),
    )


def one_of(*names: str) -> Kind:
    """Return the kind of listed names."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def either(*kinds: Kind) -> Kind:
    """Return the kind of values that have one of several kinds."""
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.accepts(value) for kind in kinds))


TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))

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
    **dict.fromkeys(("max_window_layers", "moe_layer_start_index"), _LAYER),
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
    **dict.fromkeys(("hidden_act", "hidden_activation"), TEXT),
    **dict.fromkeys(("topk_method", "scoring_func"), TEXT.or_null()),
    # tokens and labels
    "eos_token_id": either(_ID, list_of(_ID)).or_null(),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _ID.or_null()),
    "num_labels": whole(1, 10**6).or_null(),
    "id2label": OBJECT.or_null(),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), OBJECT.or_null()),
}
"""Keys of config.json that some family, a reward model, a tokenizer or a loader reads."""


def check_config_values(config: Mapping[str, Any], origin: str | None = None) -> None:
    """Check the types and ranges of the keys of a config.json dict.

    Args:
        config: contents of the file.
        origin: path of the model, for the message; None if there is none.

    Raises:
        ValueError: a value is not allowed; the message names the file, the key, the value and what is allowed.
    """
    where = "" if origin is None else f"{origin}: "
    _check(config, KEYS, where, "config.json")
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name) or {}
        for kind, own in settings.items():
            if isinstance(own, Mapping):
                _check(own, ROPE_KEYS, where, f"{name}.{kind} of config.json")
        _check({k: v for k, v in settings.items() if k in ROPE_KEYS}, ROPE_KEYS, where, f"{name} of config.json")
    quantization = config.get("quantization_config") or {}
    _check(quantization, QUANTIZATION_KEYS, where, "quantization_config of config.json")
    own = quantization.get("paddlenlp_ext") or {}
    _check(own, QUANTIZATION_OPTIONS, where, "quantization_config.paddlenlp_ext of config.json")


def _check(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str, place: str) -> None:
    for key, value in values.items():
        kind = kinds.get(key)
        if kind is not None and not kind.accepts(value):
            raise ValueError(f"{where}{key} in {place} must be {kind.words}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return a value in at most 60 characters."""
    text = f"a list of {len(value)} entries" if isinstance(value, list) and len(value) > 8 else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
