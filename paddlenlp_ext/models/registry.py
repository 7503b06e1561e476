"""Registry of model families by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paddlenlp_ext.sharding_spec import TensorPlan
from paddlenlp_ext.utils.registry import Registry


class ConfigReader(Protocol):
    """Interface through which a family reads its config. Values of config.json take precedence over defaults."""

    def value(self, key: str) -> Any:
        """Return the value of `key`; None if it is null or absent."""
        ...

    def size(self, key: str, default: int | None = None) -> int:
        """Return the positive integer under `key`."""
        ...


@dataclass(frozen=True)
class Family:
    """Model family: default config values, differences from the common decoder, sharding of the weights.

    Attributes:
        architecture: class name in config.json for transformers and inference servers.
        classifier: class name of the family's sequence classifiers; None: derived from `architecture`.
        differences: function from the config to `windows` and the other attributes of `DecoderConfig` that the family
            sets.
        tensor_plan: map from layer name patterns to sharding styles (sharding_spec.py).
        defaults: values of keys that config.json may leave out. Partial RoPE is supported if `partial_rotary_factor` is
            one of them.
        activation_key: key of the activation of the feed-forward gate.
        complete: function that rewrites special cases of config.json, such as older keys; the result is only read and
            never saved.
        fused_layers: fused projection in files -> single projections of the decoder
            (file_layouts/fused_projections.py).
    """

    architecture: str
    differences: Callable[[ConfigReader], dict[str, Any]]
    tensor_plan: TensorPlan
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    fused_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classifier: str | None = None

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
"""Sharding styles of the common decoder's weights."""

FAMILIES: Registry[Family] = Registry("model_type", "paddlenlp_ext.models.families")
