"""LoRA: Low-Rank Adaptation of Large Language Models (Hu et al. 2021, arXiv:2106.09685).

    y = x W^T + s (dropout(x) A^T) B^T        delta W = s B A        s = alpha / r

            x [..., in]
             |
             +----------------------+
             |                      | dropout
             v                      v
        W [out, in]            A [r, in]     Kaiming-uniform
        (frozen)                    |
             |                      v
             |                 B [out, r]    zero at the start
             |                      |
             v                      v * s
             +--------> (+) <-------+
                         |
                         v
                    y [..., out]

| variant | option | change | source |
| --- | --- | --- | --- |
| rsLoRA | `rslora` | s = alpha / sqrt(r): the size of the update does not shrink with the rank | arXiv:2312.03732 |
| LoRA+ | `plus_scale` | the learning rate of B is multiplied by this | arXiv:2402.12354 |
| experts, routers | `target_parameters` | layers of their own (lora/expert_layers.py) | Hugging Face PEFT |
| embedding, lm_head | `target_modules` | layers of their own (lora/layers.py) | Hugging Face PEFT |
| Gaussian A | `init_lora_weights` | A ~ N(0, 1/r^2) at the start, as in Hugging Face PEFT | arXiv:2106.09685 |

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.routers import Router
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import BIASES, PeftConfig, field_or, refuse_unread_fields
from paddlenlp_ext.peft.config_files import PaddleNLPFiles
from paddlenlp_ext.peft.inject import (
    adaptable_names,
    by_pattern,
    linear_names,
    select_targets,
    shortest_targets,
    targets_from_peft,
)
from paddlenlp_ext.peft.layers import Factor, WeightAdapter, adapter_layers, generator_for
from paddlenlp_ext.peft.linear_method_config import LayerRanksConfig
from paddlenlp_ext.peft.lora.expert_layers import (
    LoRAExperts,
    LoRARouter,
    from_stored,
    select_parameters,
    shortest_parameters,
    to_stored,
)
from paddlenlp_ext.peft.lora.layers import LoRAEmbedding, LoRAHead, LoRALinear, LoRALinearT
from paddlenlp_ext.peft.lora.stack_single_experts import stack_single_experts
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.token_rows import EMBEDDING, HEAD, TrainableTokens, token_indices
from paddlenlp_ext.quantization.quantized_grouped_linear import AnyGroupedLinear
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

# Fields in the files of LoRA and its variants that do not affect the numbers: settings of features that are switched
# off, and records of the training run.
IGNORED_PEFT_FIELDS = frozenset(
    {*("corda_config", "eva_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config")}
)
_SAME_BASE_INITS = (True, "gaussian", "eva", "orthogonal")
"""PEFT's initializations that leave the base unchanged: a stored adapter is a plain LoRA."""
_UNREADABLE_INITS = {
    "corda": "subtracts factors from the base that depend on sampled data and are not in the file, and PEFT does not "
    "load such a file either; save it from PEFT as a plain LoRA, with path_initial_model_for_weight_conversion",
    "mica": "trains A only, which is not available; set init_lora_weights to true in the file to load it as a LoRA",
}
IGNORED_PADDLENLP_FIELDS = frozenset({"dtype", "head_dim", "tensor_parallel_degree", "merge_weights", "use_quick_lora"})


@PEFT_METHODS.register("lora")
@dataclass(kw_only=True)
class LoRAConfig(LayerRanksConfig):
    """Options of LoRA, rsLoRA and LoRA+.

    Raises:
        ValueError: an option is out of range.
    """

    peft_type: ClassVar[str] = "LORA"
    targets_key: ClassVar[str] = "lora_target_modules"
    draws_a: ClassVar[bool] = True
    """Whether A starts as in LoRA, so that `init_lora_weights` chooses its distribution."""
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"plus_scale", "init_a", "target_parameters"}

    rank: int = option(8, help="rank r of the update", minimum=1, maximum=65536, arguments=("r",))
    alpha: float | None = option(
        None, help="scale of the update is alpha / rank; unset: 2 * rank, or 4 with rslora", above=0
    )
    dropout: float = option(0.0, help="dropout on the adapter's input during training", minimum=0, below=1)
    rslora: bool = option(
        False, help="rsLoRA: scale by alpha / sqrt(rank), for large ranks", key="rslora", arguments=("use_rslora",)
    )
    plus_scale: float = option(1.0, help="LoRA+: ratio of the learning rate of B to that of A", above=0)
    init_a: bool | str = option(
        True,
        help="initial A: true (Kaiming-uniform) or gaussian (standard deviation 1 / rank)",
        choices=("gaussian",),
        key="init_lora_weights",
        arguments=("init_lora_weights",),
    )
    lora_bias: bool = option(False, help="train a bias of B, which is scaled like the update", key="lora_bias")
    trainable_bias: str = option(
        "none",
        help="biases of the base to train and save with the adapter: none, all, or adapted (of the adapted layers)",
        choices=BIASES,
        synonyms={"lora_only": "adapted", "lora": "adapted"},
        arguments=("bias",),
    )
    modules_to_save: tuple[str, ...] | None = option(
        None, help='modules to train in full and save with the adapter: ends of names, such as "lm_head" or "norm"'
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
    target_parameters: tuple[str, ...] | None = option(
        None,
        help="weights of experts and routers to adapt, by the ends of their names, such as mlp.experts.gate_up_proj, "
        "mlp.experts.down_proj, mlp.gate.weight (or mlp.router.weight); unset: none",
        key="target_parameters",
    )
    ensure_weight_tying: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trainable_token_indices = token_indices(self.trainable_token_indices)
        if self.init_a is False or (self.init_a == "gaussian" and not self.draws_a):
            reason = "B starts at zero" if self.draws_a else f"{type(self).__name__} computes the initial values"
            raise ValueError(f"init_lora_weights={self.init_a!r} is not available: {reason}; leave it out")
        if self.lora_bias and type(self) is not LoRAConfig:
            raise ValueError("lora_bias is not available for variants of LoRA; leave it out")
        self._check_target_parameters()
        if self.alpha is None:
            self.alpha = 4 if self.rslora else 2 * self.rank

    def _check_target_parameters(self) -> None:
        """Normalise `target_parameters`.

        Raises:
            ValueError: other options exclude it, as in Hugging Face PEFT.
        """
        entries = self.target_parameters
        self.target_parameters = ((entries,) if isinstance(entries, str) else tuple(entries or ())) or None
        if self.target_parameters is None:
            return
        if type(self) is not LoRAConfig:
            raise ValueError("target_parameters is not available for variants of LoRA; leave it out")
        if self.dropout or self.lora_bias:
            name = "lora_dropout" if self.dropout else "lora_bias"
            raise ValueError(f"target_parameters: {name} is not available for experts and routers; leave it out")

    @property
    def starts_from_weights(self) -> bool:  # type: ignore[override]
        """Return whether the adapter starts with values of the base: the rows of trained tokens."""
        return self.trainable_token_indices is not None

    @property
    def adapts_tables(self) -> bool:  # type: ignore[override]
        """Return whether embedding and lm_head can be targets: of plain LoRA only."""
        return type(self) is LoRAConfig

    def targets(self, model: TrainableModel) -> list[str]:
        parameters = select_parameters(model, self.target_parameters or ())
        if parameters and self.target_modules == ():
            return parameters
        return [*self._target_layers(model), *parameters]

    def _target_layers(self, model: TrainableModel) -> list[str]:
        """Return the names of the linear layers and tables to wrap."""
        if not (self.adapts_tables and self.target_modules):
            return select_targets(linear_names(model), self.target_modules, self.targets_key)
        requested = self.target_modules
        if model.config.tie_word_embeddings and HEAD in requested:
            if not self.ensure_weight_tying:
                raise ValueError(
                    f"{self.targets_key}: the base ties lm_head to embed_tokens, and the adapter would change lm_head "
                    "alone; name embed_tokens, or train the adapter with ensure_weight_tying=True"
                )
            requested = tuple(EMBEDDING if entry == HEAD else entry for entry in requested)
        return select_targets(adaptable_names(model), requested, self.targets_key)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> WeightAdapter:
        rank, scaling = self.rank_and_scaling(name)
        if isinstance(base, AnyGroupedLinear):
            return LoRAExperts(base, rank, scaling, seed, name, self.init_a == "gaussian")
        if isinstance(base, Router):
            return LoRARouter(base, rank, scaling, seed, name, self.init_a == "gaussian")
        arguments = (rank, scaling, self.dropout, seed, name)
        if isinstance(base, Embedding):
            if self.lora_bias:
                raise ValueError("lora_bias is not available for an embedding; leave embed_tokens out of the targets")
            return LoRAEmbedding(base, *arguments, self.ensure_weight_tying)
        layer = (LoRAHead if name == HEAD else LoRALinear)(base, *arguments)
        if self.lora_bias:
            layer.lora_B.bias = layer.new_parameter(np.zeros(layer.out_features, np.float32))
        return self.with_initial_a(layer, name, seed)

    def with_initial_a(self, layer: LoRALinearT, name: str, seed: int) -> LoRALinearT:
        """Return a new layer, with A drawn as `init_lora_weights` says."""
        if self.init_a == "gaussian":
            generator = generator_for(seed, f"{name}.lora_A.weight")
            a = generator.standard_normal((layer.rank, layer.in_features)) / layer.rank
            layer.lora_A = Factor(a.astype(np.float32), layer.dtype)
        return layer

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return rank r and scaling s of the layer `name`."""
        rank, alpha = self.rank_and_alpha(name)
        return rank, alpha / rank**0.5 if self.rslora else alpha / rank

    def rank_and_alpha(self, name: str) -> tuple[int, float]:
        """Return rank r and alpha of the layer `name`; patterns of a router name its weight."""

        def value(pattern: Mapping[str, Any], default: Any) -> Any:
            return by_pattern(pattern, name, by_pattern(pattern, f"{name}.weight", default))

        rank, alpha = int(value(self.rank_pattern, self.rank)), value(self.alpha_pattern, self.alpha)
        assert alpha is not None
        return rank, alpha

    @property
    def changes_bias(self) -> bool:  # type: ignore[override]
        """Return whether merging changes biases."""
        return self.lora_bias

    def learning_rate_scale(self, parameter_name: str) -> float:
        return self.plus_scale if ".lora_B." in parameter_name else 1.0

    def warm_start(self, stored: PeftConfig) -> LoRAConfig:
        assert isinstance(stored, LoRAConfig)
        own = {name: getattr(self, name) for name in ("path", "dropout", "plus_scale", "init_a")}
        return dataclasses.replace(stored, **own)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        layers = {name: layer for name, layer in adapter_layers(model) if not isinstance(layer, TrainableTokens)}
        parameters = [name for name, layer in layers.items() if isinstance(layer, LoRAExperts | LoRARouter)]
        modules = [name for name in layers if name not in parameters]
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": shortest_targets(modules, model),
            "target_parameters": shortest_parameters(parameters, model) or None,
            "trainable_token_indices": self.trainable_token_indices,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "bias": "none",
            "lora_bias": self.lora_bias,
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        read = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"}
        read |= {"lora_bias", "layers_to_transform", "layers_pattern", "trainable_token_indices", "target_parameters"}
        read |= IGNORED_PEFT_FIELDS
        init = fields.get("init_lora_weights")
        if init in _UNREADABLE_INITS:
            raise ValueError(f"init_lora_weights={init!r} {_UNREADABLE_INITS[init]}")
        if init in _SAME_BASE_INITS:
            read.add("init_lora_weights")
        refuse_unread_fields(fields, read)
        return cls(
            rank=field_or(fields, "r", 8),
            alpha=field_or(fields, "lora_alpha", 8),
            dropout=field_or(fields, "lora_dropout", 0.0),
            rslora=field_or(fields, "use_rslora", False),
            lora_bias=field_or(fields, "lora_bias", False),
            target_modules=targets_from_peft(fields) if fields.get("target_modules") else TARGETS_OF_TENSORS,
            rank_pattern=field_or(fields, "rank_pattern", {}),
            alpha_pattern=field_or(fields, "alpha_pattern", {}),
            trainable_token_indices=fields.get("trainable_token_indices"),
            target_parameters=fields.get("target_parameters"),
        )

    def for_tensors(self, names: Collection[str]) -> LoRAConfig:
        if self.target_parameters:
            return self  # without target_modules, only parameters are adapted
        return dataclasses.replace(self, target_modules=resolve_targets(self.target_modules, names))

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return to_stored(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return from_stored(tensors, self.target_parameters or (), lambda name: self.rank_and_scaling(name)[0])

    def for_base(self, tensors: Mapping[str, np.ndarray], base: Any) -> tuple[PeftConfig, dict[str, np.ndarray]]:
        parameters = self.target_parameters or ()
        stacked = stack_single_experts(tensors, base, self.rank_and_alpha, self.rslora, parameters)
        if stacked is None:
            return self, dict(tensors)
        if type(self) is not LoRAConfig:
            raise ValueError(
                f"{type(self).__name__} of single experts is not available; merge the adapter in Hugging Face PEFT"
            )
        if self.dropout:
            logger.warning("lora_dropout=%g is not available for experts, and is 0 from here on", self.dropout)
        linears = [name for name in stacked.tensors if name.partition(".lora_")[0] not in stacked.layers]
        config = dataclasses.replace(
            self,
            dropout=0.0,
            target_modules=resolve_targets(TARGETS_OF_TENSORS, linears),
            target_parameters=(*parameters, *stacked.parameters),
            rank_pattern={**stacked.ranks, **self.rank_pattern},
            alpha_pattern={**stacked.alphas, **self.alpha_pattern},
            exclude_modules=None,
        )
        return config, stacked.tensors

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        read = {"r", "lora_alpha", "lora_dropout", "rslora", "target_modules", "lora_plus_scale", "scaling"}
        refuse_unread_fields(fields, read | IGNORED_PADDLENLP_FIELDS)
        return cls(
            rank=fields.get("r", 8),
            alpha=fields.get("lora_alpha", 8),
            dropout=fields.get("lora_dropout", 0.0),
            rslora=fields.get("rslora", False),
            plus_scale=fields.get("lora_plus_scale", 1.0),
            target_modules=fields.get("target_modules"),
        )

    @classmethod
    def tensors_from_paddlenlp(cls, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"{name}.weight": value.T for name, value in tensors.items()}


TARGETS_OF_TENSORS: tuple[str, ...] = ()
"""Targets of a file whose `target_modules` is null: the layers of its tensors."""


def resolve_targets(targets: tuple[str, ...] | None, names: Collection[str]) -> tuple[str, ...] | None:
    """Return `targets`, or for `TARGETS_OF_TENSORS` the layers that LoRA's or AdaLoRA's tensors `names` adapt."""
    if targets != TARGETS_OF_TENSORS:
        return targets
    return tuple(dict.fromkeys(name.partition(".lora_")[0] for name in names if ".lora_" in name))


LoraConfig = LoRAConfig  # the spelling of Hugging Face PEFT
