"""PiSSA: Principal Singular Values and Singular Vectors Adaptation (Meng et al. 2024, arXiv:2404.02948).

    W = U S V^T        A0 = sqrt(S_r / s) V_r^T,  B0 = U_r sqrt(S_r / s),  s B0 A0 = U_r S_r V_r^T
    y = x (W - s B0 A0)^T + s (dropout(x) A^T) B^T

PiSSA is a LoRA that trains the r leading singular triplets of each weight. The residual W - s B0 A0 is frozen. s is 1
unless `lora_alpha` is set. The layer keeps W, and subtracts s B0 A0 (`lora/subtracted_init.py`). A0 and B0 are
stored with the adapter, so the SVD is computed only once.

As in the paper, a quantized base stores the quantized residual. The residual is smaller than W, so its quantization
error is smaller.

    y = x Q(W - s B0 A0)^T + s (dropout(x) A^T) B^T

Files contain a plain LoRA of rank 2r for the original base. Files of Hugging Face PEFT (`init_lora_weights: "pissa"`)
and PaddleNLP (`pissa: true`) do not contain A0 and B0. When these files are loaded, A0 and B0 are recomputed from the
base with a full SVD, as in PEFT. Files with "pissa_niter_N" are rejected, because the randomized SVD that they were
trained with cannot be reproduced.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.lora.init_before_quantization import SVD_CHOICES, principal_factors
from paddlenlp_ext.peft.lora.init_from_weights import InitFromWeightsConfig
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS


@PEFT_METHODS.register("pissa")
@dataclass(kw_only=True)
class PiSSAConfig(InitFromWeightsConfig):
    """Options of PiSSA: LoRA initialized with the leading singular triplets of each weight.

    >>> PiSSAConfig(r=4, svd="exact").lora_alpha
    4
    """

    variant: ClassVar[str] = "pissa"
    recorded_options: ClassVar[tuple[str, ...]] = ("svd",)
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    missing_init_reason: ClassVar[str] = (
        "subtracts factors from the base, but the file does not contain these factors, and PEFT computes new factors "
        "each time it loads the file; save the adapter from PEFT as a plain LoRA, with "
        "path_initial_model_for_weight_conversion"
    )
    free_on_resume: ClassVar[frozenset[str]] = LowRankConfig.free_on_resume | {"svd"}

    svd: str = option(
        "fast",
        help="SVD algorithm: fast (randomized) or exact (full, takes minutes for a large matrix)",
        choices=SVD_CHOICES,
        key="pissa_svd",
    )

    def factors_of_weight(self, name: str, weight: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        exact = self.factors_source == "recomputed" or self.svd == "exact"
        rank, scaling = self.rank_and_scaling(name)
        return principal_factors(weight, rank, scaling, name, exact)

    # -- files --------------------------------------------------------------------------------------------------------
    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        """Return whether the fields describe PiSSA: PEFT's "pissa" or "pissa_niter_N", or PaddleNLP's `pissa`."""
        init = fields.get("init_lora_weights")
        by_peft = isinstance(init, str) and init.startswith("pissa")
        return by_peft or super().claims(fields) or bool(fields.get("pissa"))

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        config = super().from_paddlenlp({name: value for name, value in fields.items() if name != "pissa"})
        assert isinstance(config, PiSSAConfig)
        # PaddleNLP ignores alpha and uses s = 1.
        return config.replace(lora_alpha=config.r, use_rslora=False).with_source("recomputed")
