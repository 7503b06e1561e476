"""MoSLoRA: Mixture-of-Subspaces in Low-Rank Adaptation (Wu et al. 2024, arXiv:2406.11909), LoRA with a trained mixer.

    y = x W^T + s (dropout(x) A^T) M^T B^T        delta W = s B M A
    A [r, in], M [r, r] ~ Kaiming-uniform, B [out, r] = 0        s = alpha / r, or alpha / sqrt(r) with rsLoRA

LoRA adds r outer products of a column of B and a row of A. The mixer M has a weight for each of the r * r
possible outer products. M can be multiplied into B, so a trained adapter can be saved as a plain LoRA with
`mixer_to_lora` or `save_as_lora`.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.layers import Factor, adapter_layers_of, kaiming_uniform
from paddlenlp_ext.peft.lora.layers import LoRALinear
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig, RandomInitConfig
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.low_rank_factors import Factors
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style


class MoSLoRAAdapter(Adapter):
    """MoSLoRA adapter; at the end of training, it is saved as a plain LoRA if `mixer_to_lora` is set."""

    peft_config: MoSLoRAConfig

    @paddle.no_grad()
    def save_finished(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        if not self.peft_config.mixer_to_lora:
            self.save_pretrained(folder, tensors)
            return
        state, factors = self.full_state(tensors), {}
        for name, layer in adapter_layers_of(self.base_model, MoSLoRALinear):
            a, mixer, b = (state[f"{name}.{leaf}.weight"] for leaf in ("lora_A", "lora_AB", "lora_B"))
            factors[name] = Factors(*_fold_mixer(a, mixer, b, layer.scaling))
        save_as_lora(self, folder, factors, self.replaced_of(state))


@PEFT_METHODS.register("lora_use_mixer")
@dataclass(kw_only=True)
class MoSLoRAConfig(RandomInitConfig):
    """Options of MoSLoRA: LoRA with a mixer between the two matrices.

    >>> MoSLoRAConfig(r=4, mixer_to_lora=True).lora_alpha
    8
    """

    peft_type: ClassVar[str] = "MOSLORA"
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    adapter_class: ClassVar[type[TrainingHooks] | None] = MoSLoRAAdapter
    free_on_resume: ClassVar[frozenset[str]] = RandomInitConfig.free_on_resume | {"mixer_to_lora"}

    mixer_to_lora: bool = option(
        False, help="save the final adapter as a plain LoRA, with the mixer multiplied into B", key="mixer_to_lora"
    )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> MoSLoRALinear:
        rank, scaling = self.rank_and_scaling(name)
        return self.with_initial_a(MoSLoRALinear(base, rank, scaling, self.lora_dropout, seed, name), name, seed)

    def warm_start(self, stored: PeftConfig) -> LowRankConfig:
        return super().warm_start(stored).replace(mixer_to_lora=self.mixer_to_lora)

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return bool(fields.get("lora_use_mixer"))

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        return super().from_paddlenlp({**fields, "lora_use_mixer": False})


class MoSLoRALinear(LoRALinear):
    """Linear layer with a low-rank update and a mixer; arguments as in `LoRALinear`."""

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        self.lora_AB = Factor(kaiming_uniform((rank, rank), seed, f"{name}.lora_AB.weight"), self.dtype)

    def lora_b_weight(self) -> paddle.Tensor:
        """Return B M [out, r]; multiplying M into B costs less than multiplying each token by M."""
        return paddle.matmul(self.lora_B.weight, self.lora_AB.weight)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return A [r, in] and s B M [out, r]."""
        return _fold_mixer(self.lora_A.weight, self.lora_AB.weight, self.lora_B.weight, self.scaling)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {**super().sharding_axes(style), "lora_AB.weight": None}


def _fold_mixer(
    a: paddle.Tensor, mixer: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return A [r, in] and s B M [out, r] in float32."""
    a, mixer, b = (tensor.astype("float32") for tensor in (a, mixer, b))
    return a, paddle.matmul(b * scaling, mixer)
