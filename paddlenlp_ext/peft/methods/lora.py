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

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.lora_linear import lora_linear
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.config_files import PaddleNLPFiles
from paddlenlp_ext.peft.inject import (
    by_pattern,
    linear_names,
    select_targets,
    shortest_targets,
    targets_from_peft,
)
from paddlenlp_ext.peft.layers import Factor, LinearAdapter, adapter_layers, kaiming_uniform
from paddlenlp_ext.peft.linalg import factor_axes
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style

# Fields in the files of LoRA and its variants that do not affect the numbers: settings of features that are switched
# off, and records of the training run.
IGNORED_PEFT_FIELDS = frozenset({"megatron_core", "qalora_group_size", "runtime_config"})
IGNORED_PADDLENLP_FIELDS = frozenset({"dtype", "head_dim", "tensor_parallel_degree", "merge_weights", "use_quick_lora"})


@PEFT_METHODS.register("lora")
@dataclass(kw_only=True)
class LoRAConfig(PeftConfig):
    """Options of LoRA, rsLoRA and LoRA+.

    Raises:
        ValueError: an option is out of range.
    """

    peft_type: ClassVar[str] = "LORA"
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"plus_scale"}

    rank: int = option(8, help="rank r of the update", minimum=1, maximum=65536, arguments=("r",))
    alpha: float | None = option(
        None, help="scale of the update is alpha / rank; unset: 2 * rank, or 4 with rslora", above=0
    )
    dropout: float = option(0.0, help="dropout on the adapter's input during training", minimum=0, below=1)
    target_modules: tuple[str, ...] | None = option(
        None, help="linear layers to adapt, as name suffixes or regular expressions; unset: all but lm_head"
    )
    rslora: bool = option(
        False, help="rsLoRA: scale by alpha / sqrt(rank), for large ranks", key="rslora", arguments=("use_rslora",)
    )
    plus_scale: float = option(1.0, help="LoRA+: ratio of the learning rate of B to that of A", above=0)
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Name suffix or regular expression -> rank of the layers that it matches, as in Hugging Face PEFT."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Name suffix or regular expression -> alpha of the layers that it matches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_option("rank", *self.rank_pattern.values())
        self.check_option("alpha", *self.alpha_pattern.values())
        if self.alpha is None:
            self.alpha = 4 if self.rslora else 2 * self.rank

    def targets(self, model: TrainableModel) -> list[str]:
        return select_targets(linear_names(model), self.target_modules, "lora_target_modules")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LinearAdapter:
        return LoRALinear(base, *self.rank_and_scaling(name), self.dropout, seed, name)

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return rank r and scaling s of the layer `name`."""
        rank = int(by_pattern(self.rank_pattern, name, self.rank))
        alpha = by_pattern(self.alpha_pattern, name, self.alpha)
        assert alpha is not None
        return rank, alpha / rank**0.5 if self.rslora else alpha / rank

    def learning_rate_scale(self, parameter_name: str) -> float:
        return self.plus_scale if ".lora_B." in parameter_name else 1.0

    def warm_start(self, stored: PeftConfig) -> LoRAConfig:
        assert isinstance(stored, LoRAConfig)
        return dataclasses.replace(stored, path=self.path, dropout=self.dropout, plus_scale=self.plus_scale)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        read = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"}
        read |= {"layers_to_transform", "layers_pattern", *IGNORED_PEFT_FIELDS}
        if fields.get("init_lora_weights") in (True, "gaussian"):  # initial values only; others change the base too
            read.add("init_lora_weights")
        refuse_unread_fields(fields, read)
        return cls(
            rank=fields.get("r", 8),
            alpha=fields.get("lora_alpha", 8),
            dropout=fields.get("lora_dropout", 0.0),
            rslora=fields.get("use_rslora", False),
            target_modules=targets_from_peft(fields),
            rank_pattern=fields.get("rank_pattern") or {},
            alpha_pattern=fields.get("alpha_pattern") or {},
        )

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


LoraConfig = LoRAConfig  # the spelling of Hugging Face PEFT


class LoRALinear(LinearAdapter):
    """Linear layer with a low-rank update.

    Args:
        base: linear layer to adapt, plain or quantized.
        rank: r, the rank of the update.
        scaling: s, the factor of the update.
        dropout: dropout probability on the adapter input during training.
        seed, name: determine the initial values of A.
    """

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base)
        self.scaling = scaling
        self.dropout = dropout
        a = kaiming_uniform((rank, self.in_features), seed, f"{name}.lora_A.weight")
        self.lora_A = Factor(a, self.dtype)
        self.lora_B = Factor(np.zeros((self.out_features, rank), np.float32), self.dtype)

    @property
    def rank(self) -> int:
        """Rank r of the update."""
        return self.lora_A.weight.shape[0]

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out], in one fused op if the base is frozen and reads the same x."""
        base = self.fusable_base()
        if base is None:
            return self.base(x) + self.lora_update(x)
        return lora_linear(x, base, self.lora_A.weight, self.lora_b_weight(), self.scaling)

    def fusable_base(self) -> FrozenLinear | None:
        """Return the base's operands for an op that fuses base and update, or None if they cannot be fused."""
        return None if self.dropout and self.training else self.base.as_frozen_linear()

    def lora_update(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return s dropout(x) A^T B^T, computed through the rank: r (in + out) multiplications per token, not in * out.

        Args:
            x: [..., in].
        """
        inner = self.apply_dropout(x)
        inner = paddle.matmul(inner, self.lora_A.weight, transpose_y=True) * self.scaling
        return paddle.matmul(inner, self.lora_b_weight(), transpose_y=True)

    def lora_b_weight(self) -> paddle.Tensor:
        """Return the matrix [out, r] that is applied after A: B."""
        return self.lora_B.weight

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor] | None:
        """Return A [r, in] and s B [out, r]."""
        return self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32") * self.scaling

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Shard along with the base: B along the outputs, A along the inputs."""
        a_axis, b_axis = factor_axes(style)
        return {"lora_A.weight": a_axis, "lora_B.weight": b_axis}
