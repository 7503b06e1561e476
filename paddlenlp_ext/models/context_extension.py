"""Context extension: changes of config.json for each long-sequence strategy (linear, NTK, YaRN, LongRoPE, ...).

    strategy_name                        rope type of the saved config        max_position_embeddings
    RotaryEmbedding                      unchanged                            trained x factor
    LinearScalingRotaryEmbedding         linear                               trained (loaders multiply by factor)
    NTKScalingRotaryEmbedding            default, with a new rope_theta       trained x factor
    DynamicNTKScalingRotaryEmbedding     dynamic                              trained (loaders multiply by factor)
    YaRNScalingRotaryEmbedding           yarn                                 trained x factor
    LongRoPEScalingRotaryEmbedding       longrope                             trained x factor
    Llama3ScalingRotaryEmbedding         llama3                               trained x factor
    AttentionWithLinearBias              alibi (in this package only)         trained x factor

Saved configs use transformers' keys, so that other programs compute the same rotary embedding. nn/rope.py has the
formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.rope import (
    ALIBI,
    FULL_ATTENTION,
    RopeSettings,
    is_by_layer_type,
    stored_settings,
)

Changes = dict[str, Any]
_TRAINED = "original_max_position_embeddings"


@dataclass(frozen=True)
class Extension:
    """Context extension of a run.

    Attributes:
        rope: the model's rope settings, without scaling.
        factor: target context divided by trained context.
        trained: trained context length.
        parameters: `strategy_parameters` of the run.
    """

    rope: RopeSettings
    factor: float
    trained: int
    parameters: Mapping[str, Any]

    @property
    def target(self) -> int:
        """Length of the extended context, in positions."""
        return int(self.factor * self.trained)


@dataclass(frozen=True)
class Strategy:
    """Long-sequence strategy.

    Attributes:
        settings: function from an extension to rope settings with transformers' keys.
        parameters: supported keys of `strategy_parameters`, besides `original_max_position_embeddings`.
        keeps_length: whether `max_position_embeddings` stays the trained context, because loaders apply the factor.
    """

    settings: Callable[[Extension], Changes]
    parameters: tuple[str, ...] = ()
    keeps_length: bool = False


def _scaled(rope_type: str) -> Callable[[Extension], Changes]:
    """Return a `Strategy.settings` function for a RoPE scaling that has no parameter except the factor."""
    return lambda extension: {"rope_type": rope_type, "factor": extension.factor}


def _from_trained(rope_type: str, **defaults: Any) -> Callable[[Extension], Changes]:
    """Return a `Strategy.settings` function for scaling with a factor, the trained context and further parameters."""

    def settings(extension: Extension) -> Changes:
        return {
            "rope_type": rope_type,
            "factor": extension.factor,
            _TRAINED: extension.trained,
            **defaults,
            **extension.parameters,
        }

    return settings


def _ntk(extension: Extension) -> Changes:
    """Return NTK-aware settings: rope_theta is theta * factor^(H / (H - 2)) for H rotated channels."""
    dim = extension.rope.rotary_dim
    return {"rope_type": "default", "rope_theta": extension.rope.theta * extension.factor ** (dim / (dim - 2))}


def _longrope(extension: Extension) -> Changes:
    if "long_factor" not in extension.parameters:
        raise ValueError(
            "LongRoPEScalingRotaryEmbedding needs long_factor, the rescale factors of the frequencies: set "
            f'strategy_parameters to {{"long_factor": [{extension.rope.rotary_dim // 2} numbers]}}'
        )
    return _from_trained("longrope", short_factor=[1.0] * (extension.rope.rotary_dim // 2))(extension)


STRATEGIES: dict[str, Strategy] = {
    "RotaryEmbedding": Strategy(lambda extension: {"rope_type": "default"}),
    "LinearScalingRotaryEmbedding": Strategy(_scaled("linear"), keeps_length=True),
    "NTKScalingRotaryEmbedding": Strategy(_ntk),
    "DynamicNTKScalingRotaryEmbedding": Strategy(_scaled("dynamic"), keeps_length=True),
    "YaRNScalingRotaryEmbedding": Strategy(
        _from_trained("yarn"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "LongRoPEScalingRotaryEmbedding": Strategy(_longrope, ("short_factor", "long_factor", "attention_factor")),
    "Llama3ScalingRotaryEmbedding": Strategy(
        _from_trained("llama3", low_freq_factor=1.0, high_freq_factor=4.0), ("low_freq_factor", "high_freq_factor")
    ),
    "AttentionWithLinearBias": Strategy(lambda extension: {"rope_type": ALIBI}),
}


def context_overrides(config: Mapping[str, Any], options: ModelConfig) -> Changes:
    """Return the keys of config.json that a run's long-sequence strategy changes; {} without a strategy.

    If config.json has rope settings per layer type, only the settings of full-attention layers change. The context of a
    layer with a sliding window does not become longer.

    Args:
        config: the model's config.json.
        options: `config.model` of the run.

    Raises:
        ValueError: the model already has a rope scaling, its rope settings lack full attention, or parameters of the
            strategy are unknown, missing or invalid.
    """
    if not options.use_long_sequence_strategies:
        return {}
    name, given = options.strategy_name, options.strategy_parameters or {}
    assert name is not None, "checked by config.validation"
    strategy, stored = STRATEGIES[name], stored_settings(config)
    by_layer = is_by_layer_type(stored)
    if by_layer and FULL_ATTENTION not in stored:
        raise ValueError(f"strategy_name {name}: rope_parameters in config.json have no settings for {FULL_ATTENTION}")
    ropes = DecoderConfig.from_dict(config).ropes
    rope = ropes[config["layer_types"].index(FULL_ATTENTION)] if by_layer else ropes[0]
    if rope.rope_type != "default":
        raise ValueError(
            f"strategy_name {name}: the model's config.json already has rope type {rope.rope_type!r} and a context of "
            f"{rope.max_context}; set use_long_sequence_strategies: false, or remove the rope scaling from config.json"
        )
    parameters = dict(given)
    trained = parameters.pop(_TRAINED, rope.max_position_embeddings)
    if not isinstance(trained, int) or isinstance(trained, bool) or trained < 1:
        raise ValueError(f"strategy_parameters: {_TRAINED} must be a positive integer, got {trained!r}")
    unknown = sorted(parameters.keys() - strategy.parameters)
    if unknown:
        known = ", ".join((_TRAINED, *strategy.parameters))
        raise ValueError(f"strategy_parameters: {name} has no {', '.join(unknown)}; known: {known}")
    extension = Extension(rope, options.rope_scaling_factor, trained, parameters)
    settings = strategy.settings(extension)
    overrides = {
        "max_position_embeddings": trained if strategy.keeps_length else extension.target,
        **(
            {_TRAINED: trained} if _TRAINED in config else {}
        ),  # transformers reads this key before the key in the RoPE settings
        **_in_form_of(config, stored, settings, by_layer),
    }
    for rope in DecoderConfig.from_dict({**config, **overrides}).ropes:
        rope.inverse_frequencies(0)  # raises errors for invalid parameters before any data is read
    return overrides


def _in_form_of(config: Mapping[str, Any], stored: Mapping[str, Any], settings: Changes, by_layer: bool) -> Changes:
    """Return rope settings under the config's keys: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    own = stored.get(FULL_ATTENTION, {}) if by_layer else stored
    new = {**{key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}, **settings}
    if by_layer or config.get("rope_parameters"):
        nulls = {"rope_scaling": None} if "rope_scaling" in config else {}
        return {"rope_parameters": {**stored, FULL_ATTENTION: new} if by_layer else new, **nulls}
    theta = {"rope_theta": new.pop("rope_theta")} if "rope_theta" in new else {}
    return {**theta, "rope_scaling": None if new == {"rope_type": "default"} else new}
