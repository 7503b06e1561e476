"""Base configs of LoRA and its variants.

    y = x W^T + s (dropout(x) A^T) B^T        s = alpha / r, or alpha / sqrt(r) with rsLoRA

| base | methods |
| --- | --- |
| `LowRankConfig` | all methods below |
| `RandomInitConfig` | methods with random A and zero B: LoRA, DoRA, MoSLoRA |
| `SubtractedInitConfig` (`subtracted_init.py`) | methods that compute A and B: PiSSA, OLoRA, LoftQ, QERA, LoRA-GA |

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import BIASES, PeftConfig, field_or, refuse_unread_fields
from paddlenlp_ext.peft.layers import Factor, adapter_layers, generator_for
from paddlenlp_ext.peft.linear_method_config import LayerRanksConfig, dropout_option
from paddlenlp_ext.peft.lora.layers import LoRALinearT
from paddlenlp_ext.peft.lora.stack_single_experts import stack_single_experts
from paddlenlp_ext.peft.target_modules import by_pattern, shortest_targets, targets_from_peft
from paddlenlp_ext.peft.trainable_token_indices import TrainableTokens, token_indices

IGNORED_PEFT_FIELDS = frozenset(
    {*("corda_config", "eva_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config")}
)
"""Fields of PEFT's files that do not affect a stored adapter: settings of initialization, unused features, metadata."""
IGNORED_PADDLENLP_FIELDS = frozenset({"dtype", "head_dim", "tensor_parallel_degree", "merge_weights", "use_quick_lora"})
_SAME_BASE_INITS = (True, "gaussian", "eva", "orthogonal")
"""PEFT's initializations that do not change the base's weights, so a stored adapter is a plain LoRA."""
_UNREADABLE_INITS = {
    "corda": "subtracts factors that depend on sampled data from the base, and the file does not contain these "
    "factors; save the adapter from PEFT as a plain LoRA, with path_initial_model_for_weight_conversion",
    "mica": "trains only A, which is not supported; set init_lora_weights to true in adapter_config.json to load the "
    "adapter as a LoRA",
}
_LORA_ONLY = "variants of LoRA do not have this option; leave it out"


@dataclass(kw_only=True)
class LowRankConfig(LayerRanksConfig):
    """Options shared by LoRA and its variants with the factors A and B."""

    peft_type: ClassVar[str] = "LORA"
    refines: ClassVar[str | None] = "lora"
    targets_key: ClassVar[str] = "lora_target_modules"
    alpha_option: ClassVar[str] = "lora_alpha"
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"lora_dropout", "lora_plus_scale"}
    unavailable_keys: ClassVar[Mapping[str, str]] = {"lora_bias": _LORA_ONLY, "target_parameters": _LORA_ONLY}

    r: int = option(8, help="rank r of the update", key="lora_rank", minimum=1, maximum=65536, arguments=("rank",))
    lora_alpha: float | None = option(
        None,
        help="the update is scaled by alpha / rank, or alpha / sqrt(rank) with rslora; unset: alpha is 2 * rank, or 4 "
        "with rslora (with pissa or olora, the scale is 1)",
        key="lora_alpha",
        above=0,
        arguments=("alpha",),
    )
    lora_dropout: float = dropout_option("lora_dropout")
    use_rslora: bool = option(
        False, help="rsLoRA: scale by alpha / sqrt(rank), for large ranks", key="rslora", arguments=("rslora",)
    )
    lora_plus_scale: float = option(
        1.0,
        help="LoRA+: learning rate of B divided by the learning rate of A",
        key="lora_plus_scale",
        above=0,
        arguments=("plus_scale",),
    )
    bias: str = option(
        "none",
        help="biases of the base to train and save with the adapter: none, all, or adapted (only adapted layers)",
        key="lora_trainable_bias",
        choices=BIASES,
        synonyms={"lora_only": "adapted", "lora": "adapted"},
        arguments=("trainable_bias",),
    )
    modules_to_save: tuple[str, ...] | None = option(
        None, help='modules to train in full and save with the adapter, as name suffixes: "lm_head", "norm", ...'
    )
    exclude_modules: tuple[str, ...] | None = option(
        None, help="targets to leave out, as name suffixes or regular expressions"
    )
    trainable_token_indices: object | None = option(  # type: ignore[override]
        None,
        help="ids of tokens whose rows of the embedding (and of an lm_head tied to it) are trained with the adapter: "
        'a list such as [3, 7], or {"embed_tokens": [3], "lm_head": [3]}',
        key="trainable_token_indices",
    )
    ensure_weight_tying: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trainable_token_indices = token_indices(self.trainable_token_indices)
        if self.lora_alpha is None:
            self.lora_alpha = 4 if self.use_rslora else 2 * self.r

    @property
    def starts_from_weights(self) -> bool:  # type: ignore[override]
        """Return True if token rows are trained, because the rows start as rows of the base's weights."""
        return self.trainable_token_indices is not None

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return the rank r and the scale s of the layer `name`."""
        rank, alpha = self.rank_and_alpha(name)
        return rank, alpha / rank**0.5 if self.use_rslora else alpha / rank

    def rank_and_alpha(self, name: str) -> tuple[int, float]:
        """Return the rank r and alpha of the layer `name`; patterns match the name of the layer or of its weight."""

        def value(pattern: Mapping[str, Any], default: Any) -> Any:
            return by_pattern(pattern, name, by_pattern(pattern, f"{name}.weight", default))

        rank, alpha = int(value(self.rank_pattern, self.r)), value(self.alpha_pattern, self.lora_alpha)
        assert alpha is not None
        return rank, alpha

    def learning_rate_scale(self, parameter_name: str) -> float:
        return self.lora_plus_scale if ".lora_B." in parameter_name else 1.0

    def warm_start(self, stored: PeftConfig) -> LowRankConfig:
        assert isinstance(stored, LowRankConfig)
        return stored.replace(path=self.path, lora_dropout=self.lora_dropout, lora_plus_scale=self.lora_plus_scale)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        layers = [name for name, layer in adapter_layers(model) if not isinstance(layer, TrainableTokens)]
        return {
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "use_rslora": self.use_rslora,
            "target_modules": shortest_targets(layers, model),
            "target_parameters": None,
            "trainable_token_indices": self.trainable_token_indices,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "bias": "none",
            "lora_bias": False,
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        return cls(**cls.shared_options(fields, set()))

    @classmethod
    def shared_options(cls, fields: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
        """Return the options of `LowRankConfig`, given the fields of adapter_config.json.

        Args:
            fields: fields of adapter_config.json.
            read: names of the additional fields that the subclass reads.

        Raises:
            ValueError: a field that is not read has an effect, or adapters with the file's `init_lora_weights` cannot
                be loaded.
        """
        own = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"}
        own |= {"layers_to_transform", "layers_pattern", "trainable_token_indices", *IGNORED_PEFT_FIELDS}
        init = fields.get("init_lora_weights")
        if init in _UNREADABLE_INITS:
            raise ValueError(f"init_lora_weights={init!r} {_UNREADABLE_INITS[init]}")
        if init in _SAME_BASE_INITS:
            own.add("init_lora_weights")
        refuse_unread_fields(fields, own | read)
        return {
            "r": field_or(fields, "r", 8),
            "lora_alpha": field_or(fields, "lora_alpha", 8),
            "lora_dropout": field_or(fields, "lora_dropout", 0.0),
            "use_rslora": field_or(fields, "use_rslora", False),
            "target_modules": targets_from_peft(fields) if fields.get("target_modules") else TARGETS_OF_TENSORS,
            "rank_pattern": field_or(fields, "rank_pattern", {}),
            "alpha_pattern": field_or(fields, "alpha_pattern", {}),
            "trainable_token_indices": fields.get("trainable_token_indices"),
        }

    def for_tensors(self, names: Collection[str]) -> LowRankConfig:
        return self.replace(target_modules=resolve_targets(self.target_modules, names))

    def for_base(self, tensors: Mapping[str, np.ndarray], base: Any) -> tuple[PeftConfig, dict[str, np.ndarray]]:
        if stack_single_experts(tensors, base, self.rank_and_alpha, self.use_rslora) is not None:
            raise ValueError(
                f"{type(self).__name__} with one adapter per expert is not available; merge the adapter in "
                "Hugging Face PEFT"
            )
        return self, dict(tensors)

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        read = {"r", "lora_alpha", "lora_dropout", "rslora", "target_modules", "lora_plus_scale", "scaling"}
        refuse_unread_fields(fields, read | IGNORED_PADDLENLP_FIELDS)
        return cls(
            r=fields.get("r", 8),
            lora_alpha=fields.get("lora_alpha", 8),
            lora_dropout=fields.get("lora_dropout", 0.0),
            use_rslora=fields.get("rslora", False),
            lora_plus_scale=fields.get("lora_plus_scale", 1.0),
            target_modules=fields.get("target_modules"),
        )

    @classmethod
    def tensors_from_paddlenlp(cls, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"{name}.weight": value.T for name, value in tensors.items()}


@dataclass(kw_only=True)
class RandomInitConfig(LowRankConfig):
    """Options of variants that start with a random A and B = 0."""

    free_on_resume: ClassVar[frozenset[str]] = LowRankConfig.free_on_resume | {"init_lora_weights"}

    init_lora_weights: bool | str = option(
        True,
        help="initial A: true (Kaiming-uniform) or gaussian (standard deviation 1 / rank)",
        choices=("gaussian",),
        key="init_lora_weights",
        arguments=("init_a",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_lora_weights is False:
            raise ValueError("init_lora_weights=False is not available, because B always starts at zero; leave it out")

    def with_initial_a(self, layer: LoRALinearT, name: str, seed: int) -> LoRALinearT:
        """Draw A of a new layer from the distribution that `init_lora_weights` selects; return the layer."""
        if self.init_lora_weights == "gaussian":
            generator = generator_for(seed, f"{name}.lora_A.weight")
            a = generator.standard_normal((layer.rank, layer.in_features)) / layer.rank
            layer.lora_A = Factor(a.astype(np.float32), layer.dtype)
        return layer

    def warm_start(self, stored: PeftConfig) -> LowRankConfig:
        return super().warm_start(stored).replace(init_lora_weights=self.init_lora_weights)


TARGETS_OF_TENSORS: tuple[str, ...] = ()
"""Marker for a file whose `target_modules` is null; the names of the stored tensors determine the targets."""


def resolve_targets(targets: tuple[str, ...] | None, names: Collection[str]) -> tuple[str, ...] | None:
    """Return `targets`, or the layers of the LoRA tensors `names` if `targets` is `TARGETS_OF_TENSORS`."""
    if targets != TARGETS_OF_TENSORS:
        return targets
    return tuple(dict.fromkeys(name.partition(".lora_")[0] for name in names if ".lora_" in name))
