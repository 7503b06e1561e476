"""SoRA: Sparse Low-rank Adaptation of Pre-trained Language Models (Ding et al. 2023, arXiv:2311.11696).

    y = x W^T + s ((dropout(x) A^T) * g) B^T        delta W = s B diag(g) A        s = alpha / r
    A [r, in] ~ Kaiming-uniform, B [out, r] = 0, gate g [r] ~ N(0, 1)

The optimizer updates A, B and g. After each step, with η the learning rate of the gates,

    g <- T(g, η λ)        T(v, ξ) = sign(v) max(|v| - ξ, 0)

T is the proximal step for the penalty λ |g|_1. Gates that do not reduce the loss shrink to zero, and the rank falls.
λ is `sparse_lambda`. As in the published code, `penalty` times the mean |g| is added to the loss. The published
code calls both options `sparse_lambda`, and its threshold is λ without the factor η (docs/adapters.md). The final
adapter is a plain LoRA with the ranks of the nonzero gates, and with g multiplied into A.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import adapter_layers, adapter_layers_of, generator_for, new_parameter, take_ranks
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig
from paddlenlp_ext.peft.lora.layers import LoRALinear
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


class SoRAAdapter(Adapter):
    """Adapter that shrinks the gates after each step, and saves the final adapter as a LoRA."""

    peft_config: SoRAConfig

    def layers(self) -> dict[str, SoRALinear]:
        """Return the adapted layers by name."""
        return dict(adapter_layers_of(self.base_model, SoRALinear))

    def auxiliary_loss(self) -> paddle.Tensor | None:
        """Return this pipeline stage's share of `penalty` times the mean |g|; None if the share is 0."""
        if self.peft_config.penalty == 0:
            return None
        layers = self.layers().values()
        gates = [layer.gate for layer in layers if layer.is_on_stage]
        if not gates:
            return None
        return paddle.concat(gates).abs().sum() * (self.peft_config.penalty / sum(layer.rank for layer in layers))

    @paddle.no_grad()
    def after_step(self, step: int, total_steps: int, learning_rate: float) -> None:
        """Apply the proximal step to the gates."""
        threshold = learning_rate * self.peft_config.gate_scale * self.peft_config.sparse_lambda
        for layer in self.layers().values():
            if layer.is_on_stage:
                layer.gate.set_value(F.softshrink(layer.gate, threshold))

    def save_finished(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Save a plain LoRA with the ranks whose gates are nonzero; leave out layers with only zero gates.

        If all gates are zero, one rank is saved.
        """
        layers, state, lora_tensors = self.layers(), self.full_state(tensors), {}
        nonzero = {name: np.flatnonzero(state[f"{name}.gate"].numpy()) for name in layers}
        ranks = {name: indices.size for name, indices in nonzero.items() if indices.size}
        if not ranks:
            first = next(iter(layers))
            ranks, nonzero[first] = {first: 1}, np.array([0])
            logger.warning("SoRA: every gate is zero, so the adapter has no effect; lower sora_sparse_lambda")
        total = sum(layer.rank for layer in layers.values())
        logger.info(
            "SoRA: %d of %d ranks remain, in %d of %d layers", sum(ranks.values()), total, len(ranks), len(layers)
        )
        lora = self.peft_config.finished_lora_config(ranks)
        fields = lora.to_adapter_config(self.base_model)
        fields["target_modules"] = shortest_targets(list(ranks), self.base_model)
        for name in ranks:
            a, b, gate = (state[f"{name}.{leaf}"] for leaf in ("lora_A.weight", "lora_B.weight", "gate"))
            a, b = gated_to_lora(a, b, gate, nonzero[name])
            lora_tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        self.write_files(folder, lora.peft_type, fields, {**lora_tensors, **self.replaced_of(state)})


@PEFT_METHODS.register("sora")
@dataclass(kw_only=True)
class SoRAConfig(LinearTargetsConfig):
    """Options of SoRA.

    >>> SoRAConfig(r=16).alpha
    32
    """

    peft_type: ClassVar[str] = "SORA"
    targets_key: ClassVar[str] = "sora_target_modules"
    adapter_class: ClassVar[type[TrainingHooks] | None] = SoRAAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"sparse_lambda", "penalty", "gate_scale"}

    r: int = option(
        16, help="initial rank of every layer's update", minimum=1, maximum=65536, arguments=("rank",), key="sora_rank"
    )
    alpha: float | None = option(None, help="the update is scaled by alpha / rank; unset: alpha is 2 * rank", above=0)
    dropout: float = option(0.0, help="dropout on the adapter's input during training", minimum=0, below=1)
    sparse_lambda: float = option(
        0.5, help="proximal step: after each optimizer step, gates shrink by this value times the gates' learning rate",
        minimum=0,
    )  # fmt: skip
    penalty: float = option(0.1, help="weight of the gates' mean absolute value in the loss", minimum=0)
    gate_scale: float = option(
        1.0, help="learning rate of the gates divided by the learning rate of the other parameters", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is None:
            self.alpha = 2 * self.r

    def wrap(self, name: str, base: nn.Layer, seed: int) -> SoRALinear:
        assert self.alpha is not None
        return SoRALinear(base, self.r, self.alpha / self.r, self.dropout, seed, name)

    def learning_rate_scale(self, parameter_name: str) -> float:
        return self.gate_scale if parameter_name.endswith(".gate") else 1.0

    def warm_start(self, stored: PeftConfig) -> SoRAConfig:
        assert isinstance(stored, SoRAConfig)
        shape = {name: getattr(stored, name) for name in ("r", "alpha", "target_modules")}
        return self.replace(**shape)

    def finished_lora_config(self, ranks: Mapping[str, int]) -> LoRAConfig:
        """Return the config of a LoRA with the given ranks (layer -> rank) and the scale of this config."""
        assert self.alpha is not None
        scaling, common_rank = self.alpha / self.r, Counter(ranks.values()).most_common(1)[0][0]
        others = {name: rank for name, rank in ranks.items() if rank != common_rank}
        return LoRAConfig(
            r=common_rank,
            lora_alpha=scaling * common_rank,
            lora_dropout=self.dropout,
            rank_pattern=others,
            alpha_pattern={name: scaling * rank for name, rank in others.items()},
        )

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "sparse_lambda": self.sparse_lambda,
            "penalty": self.penalty,
            "gate_scale": self.gate_scale,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> SoRAConfig:
        same = {"sparse_lambda", "penalty", "gate_scale"}
        refuse_unread_fields(fields, {*same, "r", "lora_alpha", "lora_dropout", "target_modules"})
        return cls(
            **{name: fields[name] for name in same if name in fields},
            r=fields.get("r", 16),
            alpha=fields.get("lora_alpha"),
            dropout=fields.get("lora_dropout", 0.0),
            target_modules=targets_from_peft(fields),
        )


class SoRALinear(LoRALinear):
    """Linear layer with a gated low-rank update; arguments as in `LoRALinear`."""

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        gate = generator_for(seed, f"{name}.gate").standard_normal(rank).astype(np.float32)
        # Float32, so the optimizer does not keep a master copy. A master copy would undo the proximal step.
        self.gate = new_parameter(self, gate, "float32")

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        inner = self.apply_dropout(x)
        inner = paddle.matmul(inner, self.lora_A.weight, transpose_y=True)
        inner = inner * (self.gate * self.scaling).astype(inner.dtype)
        return self.base(x) + paddle.matmul(inner, self.lora_B.weight, transpose_y=True)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return s diag(g) A and B."""
        gate = (self.gate * self.scaling).unsqueeze(1)
        return self.lora_A.weight.astype("float32") * gate, self.lora_B.weight.astype("float32")

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {**super().sharding_axes(style), "gate": None}


def gated_to_lora(
    a: paddle.Tensor, b: paddle.Tensor, gate: paddle.Tensor, ranks: np.ndarray
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return A [r', in], multiplied by the gate [r], and B [out, r'] for the selected ranks, in the dtype of A."""
    gated = a.astype("float32") * gate.unsqueeze(1)
    return take_ranks(gated, ranks, 0).astype(a.dtype), take_ranks(b, ranks, 1)
