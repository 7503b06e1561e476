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
| rsLoRA | `use_rslora` | s = alpha / sqrt(r), so that high ranks do not shrink the update | arXiv:2312.03732 |
| LoRA+ | `lora_plus_scale` | multiplies the learning rate of B | arXiv:2402.12354 |
| experts, routers | `target_parameters` | adapted by the layers in lora/expert_layers.py | Hugging Face PEFT |
| embedding, lm_head | `target_modules` | adapted by the layers in lora/layers.py | Hugging Face PEFT |
| Gaussian A | `init_lora_weights` | A ~ N(0, 1/r^2) at the start | arXiv:2106.09685, Hugging Face PEFT |

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.routers import Router
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, field_or
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.formats.peft_experts import experts_from_stored, experts_to_stored
from paddlenlp_ext.peft.layers import WeightAdapter, adapter_layers
from paddlenlp_ext.peft.lora.expert_layers import (
    LoRAExperts,
    LoRARouter,
    select_parameters,
    shortest_parameters,
)
from paddlenlp_ext.peft.lora.layers import LoRAEmbedding, LoRAHead, LoRALinear
from paddlenlp_ext.peft.lora.low_rank_config import TARGETS_OF_TENSORS, LowRankConfig, RandomInitConfig, resolve_targets
from paddlenlp_ext.peft.lora.stack_single_experts import stack_single_experts
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import adaptable_names, linear_names, select_targets, shortest_targets
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, HEAD, TrainableTokens
from paddlenlp_ext.quantization.quantized_grouped_linear import AnyGroupedLinear
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


def _variant(name: str) -> Any:
    """Declare the flag of a variant; if the flag is True, the constructor returns the variant's config."""
    return field(default=False, repr=False, compare=False, metadata={"variant": name})


@PEFT_METHODS.register("lora")
@dataclass(kw_only=True)
class LoRAConfig(RandomInitConfig):
    """Options of LoRA, rsLoRA and LoRA+.

    The flag of a variant, or Hugging Face PEFT's `init_lora_weights`, selects the variant's config:

    >>> LoRAConfig(r=4, lora_alpha=8).lora_alpha
    8
    >>> type(LoRAConfig(r=4, use_dora=True)).__name__
    'DoRAConfig'
    >>> type(LoRAConfig(init_lora_weights="pissa")).__name__
    'PiSSAConfig'

    Raises:
        ValueError: an option is out of range, or two variants are selected.
    """

    refines: ClassVar[str | None] = None
    adapts_tables: ClassVar[bool] = True
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    free_on_resume: ClassVar[frozenset[str]] = RandomInitConfig.free_on_resume | {"target_parameters"}
    unavailable_keys: ClassVar[Mapping[str, str]] = {}

    lora_bias: bool = option(False, help="train a bias of B; the bias is scaled like the update", key="lora_bias")
    target_parameters: tuple[str, ...] | None = option(
        None,
        help="weights of experts, routers and linear layers to adapt, as name suffixes: mlp.experts.gate_up_proj, "
        "mlp.experts.down_proj, mlp.gate.weight (or mlp.router.weight), mlp.up_proj.weight; unset: no weights",
        key="target_parameters",
    )
    use_dora: bool = _variant("DoRA")
    use_mora: bool = _variant("MoRA")
    lora_use_mixer: bool = _variant("MoSLoRA")
    pissa: bool = _variant("PiSSA")
    olora: bool = _variant("OLoRA")
    loftq: bool = _variant("LoftQ")
    qera: bool = _variant("QERA")
    lora_ga: bool = _variant("LoRA-GA")

    def __post_init__(self) -> None:
        super().__post_init__()
        entries = self.target_parameters
        self.target_parameters = ((entries,) if isinstance(entries, str) else tuple(entries or ())) or None
        if self.target_parameters and (self.lora_dropout or self.lora_bias):  # as in Hugging Face PEFT
            name = "lora_dropout" if self.lora_dropout else "lora_bias"
            raise ValueError(f"target_parameters: {name} is not available for experts and routers; leave it out")

    def targets(self, model: TrainableModel) -> list[str]:
        parameters = select_parameters(model, self.target_parameters) if self.target_parameters else []
        if parameters and self.target_modules == ():
            return parameters
        return list(dict.fromkeys([*self._target_layers(model), *parameters]))

    def _target_layers(self, model: TrainableModel) -> list[str]:
        """Return the names of the layers to wrap: linear layers, embedding and lm_head."""
        if not self.target_modules:
            return select_targets(linear_names(model), self.target_modules, self.targets_key)
        requested = self.target_modules
        if model.config.tie_word_embeddings and HEAD in requested:
            if not self.ensure_weight_tying:
                raise ValueError(
                    f"{self.targets_key}: the base ties lm_head to embed_tokens, and the adapter would change only "
                    "lm_head; name embed_tokens, or train the adapter with ensure_weight_tying=True"
                )
            requested = tuple(EMBEDDING if entry == HEAD else entry for entry in requested)
        return select_targets(adaptable_names(model), requested, self.targets_key)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> WeightAdapter:
        rank, scaling = self.rank_and_scaling(name)
        if isinstance(base, AnyGroupedLinear):
            return LoRAExperts(base, rank, scaling, seed, name, self.init_lora_weights == "gaussian")
        if isinstance(base, Router):
            return LoRARouter(base, rank, scaling, seed, name, self.init_lora_weights == "gaussian")
        arguments = (rank, scaling, self.lora_dropout, seed, name)
        if isinstance(base, Embedding):
            if self.lora_bias:
                raise ValueError("lora_bias is not available for an embedding; leave embed_tokens out of the targets")
            return LoRAEmbedding(base, *arguments, self.ensure_weight_tying)
        layer = (LoRAHead if name == HEAD else LoRALinear)(base, *arguments)
        if self.lora_bias:
            layer.lora_B.bias = layer.new_parameter(np.zeros(layer.out_features, np.float32))
        return self.with_initial_a(layer, name, seed)

    @property
    def changes_bias(self) -> bool:  # type: ignore[override]
        """Return whether merging changes biases."""
        return self.lora_bias

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        layers = {name: layer for name, layer in adapter_layers(model) if not isinstance(layer, TrainableTokens)}
        parameters = select_parameters(model, self.target_parameters) if self.target_parameters else []
        parameters = [name for name in layers if name in parameters]
        return {
            **super().to_adapter_config(model),
            "target_modules": shortest_targets([name for name in layers if name not in parameters], model),
            "target_parameters": shortest_parameters(parameters, model) or None,
            "lora_bias": self.lora_bias,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        return cls(
            **cls.shared_options(fields, {"lora_bias", "target_parameters"}),
            lora_bias=field_or(fields, "lora_bias", False),
            target_parameters=fields.get("target_parameters"),
        )

    def for_tensors(self, names: Collection[str]) -> LowRankConfig:
        # A file with `target_parameters` and without `target_modules` adapts no linear layers.
        return self if self.target_parameters else super().for_tensors(names)

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return experts_to_stored(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return experts_from_stored(tensors, self.target_parameters or (), lambda name: self.rank_and_scaling(name)[0])

    def for_base(self, tensors: Mapping[str, np.ndarray], base: Any) -> tuple[PeftConfig, dict[str, np.ndarray]]:
        parameters = self.target_parameters or ()
        stacked = stack_single_experts(tensors, base, self.rank_and_alpha, self.use_rslora, parameters)
        if stacked is None:
            return self, dict(tensors)
        if self.lora_dropout:
            logger.warning("lora_dropout=%g is not available for experts; using 0", self.lora_dropout)
        linears = [name for name in stacked.tensors if name.partition(".lora_")[0] not in stacked.layers]
        config = self.replace(
            lora_dropout=0.0,
            target_modules=resolve_targets(TARGETS_OF_TENSORS, linears),
            target_parameters=(*parameters, *stacked.parameters),
            rank_pattern={**stacked.ranks, **self.rank_pattern},
            alpha_pattern={**stacked.alphas, **self.alpha_pattern},
            exclude_modules=None,
        )
        return config, stacked.tensors


LoraConfig = LoRAConfig  # the spelling of Hugging Face PEFT
