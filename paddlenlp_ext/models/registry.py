"""Registry of model families by the `model_type` of config.json, and the reader of config.json for a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddlenlp_ext.sharding_spec import TensorPlan
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.registry import Registry
from paddlenlp_ext.utils.suggest import nearest

_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


class ConfigReader:
    """Reader of config values: values in config.json, else the family's defaults, else the common defaults."""

    def __init__(self, source: Mapping[str, Any], family: Family) -> None:
        self._layers = (source, family.defaults, _COMMON_DEFAULTS)

    def value(self, key: str) -> Any:
        """Return the value of `key`; None if the value is null or absent."""
        for layer in self._layers:
            if key in layer:
                return layer[key]
        return None

    def size(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, a positive integer.

        Raises:
            ValueError: the value is missing, not an integer, or below 1.
        """
        value = self.value(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} in config.json must be a positive integer, got {value!r}")
        return value


def require(config: ConfigReader, key: str, *supported: Any) -> None:
    """Check that the value of a key of config.json is one of `supported`.

    Raises:
        ValueError: the value is not supported.
    """
    if config.value(key) not in supported:
        known = ", ".join(repr(value) for value in supported if value is not None)
        raise ValueError(
            f"{key} {config.value(key)!r} in config.json is not supported for this model_type; supported: {known}"
        )


@dataclass(frozen=True)
class Family:
    """Model family: default config values, `DecoderConfig` attributes, and sharding of the weights.

    Attributes:
        architecture: class name in config.json for transformers and inference servers.
        classifier: class name of the family's sequence classifiers; None: derived from `architecture`.
        differences: function from the config to the `DecoderConfig` attributes that the family sets, such as `windows`.
        tensor_plan: map from layer name patterns to sharding styles (sharding_spec.py).
        defaults: default values of config.json keys. A default for `partial_rotary_factor` enables partial RoPE.
        activation_key: key of the activation of the feed-forward.
        gated: whether the feed-forward has a gate.
        complete: function that converts a config.json dict to common keys, such as older keys to newer keys. The result
            is not saved.
        derived: required keys of config.json that `complete` derives from other keys.
        fused_layers: fused projection in the checkpoint -> single projections of the decoder
            (file_layouts/fused_projections.py).
        is_translated_by_peft: whether Hugging Face PEFT reads entries of `target_modules` as names of experts
            (peft/formats/peft_experts.py).
    """

    architecture: str
    differences: Callable[[ConfigReader], dict[str, Any]]
    tensor_plan: TensorPlan
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    gated: bool = True
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    fused_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    classifier: str | None = None
    is_translated_by_peft: bool = False

    @property
    def classifier_architecture(self) -> str:
        """Class name of sequence classifiers in config.json."""
        return self.classifier or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


DECODER_TENSOR_PLAN: TensorPlan = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}
"""Sharding styles of the weights of a dense decoder with grouped-query attention."""

_LACKING = Path(__file__).parent / "unsupported_families.json"
"""Model types of known families that are not supported, each with the parts that this package lacks."""
FAMILIES: Registry[Family] = Registry("model_type", "paddlenlp_ext.models.families")


def unsupported_family(model_type: str) -> str:
    """Return the error message for a model type without support, with the nearest supported model type."""
    lacking = read_json_object(_LACKING).get(model_type)
    similar = nearest(model_type, FAMILIES.names(), cutoff=0.5 if lacking else 0.85)
    because = f", because this package lacks {lacking}" if lacking else ""
    most_similar = f"the most similar supported family is {similar!r}; " if similar else ""
    return (
        f"model_type {model_type!r} in config.json is not supported{because}; {most_similar}"
        f"supported: {', '.join(FAMILIES.names())}"
    )
