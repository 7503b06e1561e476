"""LoRA initialized from a decomposition of each weight: PiSSA (SVD) and OLoRA (QR).

    s B0 A0 = component of W that the decomposition selects; W - s B0 A0 stays frozen or is quantized

Adapter files written by this package contain A0 and B0 (`subtracted_init.py`). Files written by Hugging Face PEFT and
PaddleNLP do not contain A0 and B0, so loading a file of PEFT or PaddleNLP decomposes the base weights again.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.layers import has_values
from paddlenlp_ext.peft.lora.init_before_quantization import InitBeforeQuantizationConfig, InitialFactors
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.lora.subtracted_init import LoRALinearWithInit
from paddlenlp_ext.quantization.quantize_weight import QuantizeDequantize
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear


@dataclass(kw_only=True)
class InitFromWeightsConfig(InitBeforeQuantizationConfig):
    """Options of LoRA variants that start from a decomposition of the weight; s is 1 unless `lora_alpha` is set."""

    starts_from_weights: ClassVar[bool] = True  # type: ignore[override]

    def __post_init__(self) -> None:
        if self.lora_alpha is None:
            self.lora_alpha = self.r**0.5 if self.use_rslora else self.r
        super().__post_init__()

    def factors_of_weight(self, name: str, weight: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return A0 [r, in] and B0 [out, r] for the weight, float32 [out, in], of the layer `name`."""
        raise NotImplementedError

    def find_initial_factors(
        self, name: str, weight: paddle.Tensor, quantize_dequantize: QuantizeDequantize
    ) -> InitialFactors:
        a, b = self.factors_of_weight(name, weight)
        return InitialFactors(a, b, a, b)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LoRALinearWithInit:
        if isinstance(base, QuantizedLinear):
            return self.wrap_quantized(name, base, seed)
        rank, scaling = self.rank_and_scaling(name)
        persist_init = self.factors_source != "recomputed"
        layer = LoRALinearWithInit(base, rank, scaling, self.lora_dropout, seed, name, persist_init=persist_init)
        if self.factors_source != "stored" and has_values(base):
            layer.set_initial_factors(*self.factors_of_weight(name, layer.base.weight_value()))
        return layer

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        if self.factors_source == "recomputed":
            return {**LowRankConfig.to_adapter_config(self, model), "init_lora_weights": self.variant}
        return super().to_adapter_config(model)

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return dict(tensors) if self.factors_source == "recomputed" else super().to_stored(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(tensors) if self.factors_source == "recomputed" else super().from_stored(tensors)

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        if fields.get("init_lora_weights") != cls.variant:
            return super().from_adapter_config(fields)
        config = super().from_adapter_config({**fields, "init_lora_weights": True})
        assert isinstance(config, InitFromWeightsConfig)
        return config.with_source("recomputed")
