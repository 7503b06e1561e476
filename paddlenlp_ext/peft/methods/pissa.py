"""PiSSA: Principal Singular Values and Singular Vectors Adaptation (Meng et al. 2024, arXiv:2404.02948).

    W = U S V^T        A0 = sqrt(S_r / s) V_r^T,  B0 = U_r sqrt(S_r / s),  s B0 A0 = U_r S_r V_r^T
    y = x (W - s B0 A0)^T + s (dropout(x) A^T) B^T

LoRA that trains the r leading singular triplets of each weight; the residual W - s B0 A0 stays frozen. s is 1 unless
`lora_alpha` is set. W is not overwritten with the residual (`_lora_init.py` explains why). A0 and B0 are stored with
the adapter, so that the SVD is never recomputed.

A quantized base holds the quantized residual, as in the paper: it is smaller than W, and so is its error.

    y = x Q(W - s B0 A0)^T + s (dropout(x) A^T) B^T

Files hold a plain LoRA of rank 2r over the original base. The files of Hugging Face PEFT (`init_lora_weights: "pissa"`)
and of PaddleNLP (`pissa: true`) do not contain A0 and B0; those are recomputed from the base by a full SVD.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.layers import has_values
from paddlenlp_ext.peft.methods._lora_init import LoRALinearWithInit
from paddlenlp_ext.peft.methods._quantized_lora_init import (
    SVD_CHOICES,
    InitialFactors,
    QuantizedInitLoRAConfig,
    principal_factors,
)
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.quantization.quantize import QuantizeDequantize


@PEFT_METHODS.register("pissa")
@dataclass(kw_only=True)
class PiSSAConfig(QuantizedInitLoRAConfig):
    """Options of PiSSA: LoRA initialized with the leading singular triplets of each weight.

    Raises:
        ValueError: an option is out of range.
    """

    variant: ClassVar[str] = "pissa"
    recorded_options: ClassVar[tuple[str, ...]] = ("svd",)
    missing_init_reason: ClassVar[str] = (
        "was initialized by a randomized SVD, which the file does not contain; save the adapter from PEFT as a plain "
        "LoRA, with path_initial_model_for_weight_conversion"
    )
    starts_from_weights: ClassVar[bool] = True
    free_on_resume: ClassVar[frozenset[str]] = LoRAConfig.free_on_resume | {"svd"}

    svd: str = option(
        "fast",
        help="SVD algorithm: fast (randomized) or exact (full; minutes for a large matrix)",
        choices=SVD_CHOICES,
        key="pissa_svd",
    )

    def __post_init__(self) -> None:
        if self.alpha is None:
            self.alpha = self.rank**0.5 if self.rslora else self.rank
        super().__post_init__()

    def find_initial_factors(
        self, name: str, weight: paddle.Tensor, quantize_dequantize: QuantizeDequantize
    ) -> InitialFactors:
        exact = self.init == "recomputed" or self.svd == "exact"
        rank, scaling = self.rank_and_scaling(name)
        a, b = principal_factors(weight, rank, scaling, name, exact)
        return InitialFactors(a, b, a, b)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LoRALinearWithInit:
        if isinstance(base, QuantizedLinear):
            return self.wrap_quantized(name, base, seed)
        rank, scaling = self.rank_and_scaling(name)
        is_recomputed = self.init == "recomputed"
        layer = LoRALinearWithInit(base, rank, scaling, self.dropout, seed, name, persist_init=not is_recomputed)
        if self.init != "stored" and has_values(base):
            layer.set_initial_factors(
                *principal_factors(layer.base.weight_value(), rank, scaling, name, is_recomputed or self.svd == "exact")
            )
        return layer

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        if self.init == "recomputed":
            return {**LoRAConfig.to_adapter_config(self, model), "init_lora_weights": "pissa"}
        return super().to_adapter_config(model)

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return dict(tensors) if self.init == "recomputed" else super().to_stored(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(tensors) if self.init == "recomputed" else super().from_stored(tensors)

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        """Return whether the fields are PiSSA's, including PEFT's "pissa_niter_N" and PaddleNLP's `pissa`."""
        init = fields.get("init_lora_weights")
        by_peft = isinstance(init, str) and init.startswith("pissa")
        return by_peft or super().claims(fields) or bool(fields.get("pissa"))

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        if fields.get("init_lora_weights") != "pissa":
            return super().from_adapter_config(fields)
        return replace(super().from_adapter_config({**fields, "init_lora_weights": True}), init="recomputed")

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        config = super().from_paddlenlp({name: value for name, value in fields.items() if name != "pissa"})
        # PaddleNLP ignores alpha: its s is 1.
        return replace(config, alpha=config.rank, rslora=False, init="recomputed")
