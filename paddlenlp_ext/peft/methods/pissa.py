"""PiSSA: Principal Singular Values and Singular Vectors Adaptation (Meng et al. 2024, arXiv:2404.02948).

    W = U S V^T        A0 = sqrt(S_r / s) V_r^T,  B0 = U_r sqrt(S_r / s),  s B0 A0 = U_r S_r V_r^T
    y = x (W - s B0 A0)^T + s (dropout(x) A^T) B^T

LoRA that trains the r leading singular triplets of each weight; the residual W - s B0 A0 stays frozen. s is 1 unless
`lora_alpha` is set. W is not overwritten with the residual (`lora/subtracted_init.py` explains why). A0 and B0 are
stored with the adapter, so that the SVD is never recomputed.

A quantized base stores the quantized residual, as in the paper: the residual is smaller than W, and so is its error.

    y = x Q(W - s B0 A0)^T + s (dropout(x) A^T) B^T

Files contain a plain LoRA of rank 2r over the original base. Files of Hugging Face PEFT (`init_lora_weights: "pissa"`)
and PaddleNLP (`pissa: true`) do not contain A0 and B0, which are recomputed from the base with a full SVD, as in PEFT.
For "pissa_niter_N" PEFT runs a randomized SVD again, which approximates the full SVD.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from paddlenlp_ext.config.options import option
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.lora.init_before_quantization import SVD_CHOICES, principal_factors
from paddlenlp_ext.peft.lora.init_from_weights import InitFromWeightsConfig
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


@PEFT_METHODS.register("pissa")
@dataclass(kw_only=True)
class PiSSAConfig(InitFromWeightsConfig):
    """Options of PiSSA: LoRA initialized with the leading singular triplets of each weight.

    >>> PiSSAConfig(r=4, svd="exact").lora_alpha
    4

    Raises:
        ValueError: an option is out of range.
    """

    variant: ClassVar[str] = "pissa"
    recorded_options: ClassVar[tuple[str, ...]] = ("svd",)
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    missing_init_reason: ClassVar[str] = "is not known; PEFT has 'pissa' and 'pissa_niter_N'"
    free_on_resume: ClassVar[frozenset[str]] = LowRankConfig.free_on_resume | {"svd"}

    svd: str = option(
        "fast",
        help="SVD algorithm: fast (randomized) or exact (full; minutes for a large matrix)",
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
        """Return whether the fields describe PiSSA, including PEFT's "pissa_niter_N" and PaddleNLP's `pissa`."""
        init = fields.get("init_lora_weights")
        by_peft = isinstance(init, str) and init.startswith("pissa")
        return by_peft or super().claims(fields) or bool(fields.get("pissa"))

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        init = fields.get("init_lora_weights")
        if re.fullmatch(r"pissa_niter_\d+", str(init)):
            logger.warning(
                "init_lora_weights=%r: the file lacks the initial factors, which a randomized SVD computed; they are "
                "recomputed with a full SVD (Hugging Face PEFT runs a new randomized SVD at each loading)",
                init,
            )
            fields = {**fields, "init_lora_weights": cls.variant}
        return super().from_adapter_config(fields)

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        config = super().from_paddlenlp({name: value for name, value in fields.items() if name != "pissa"})
        assert isinstance(config, PiSSAConfig)
        # PaddleNLP ignores alpha and uses s = 1.
        return config.replace(lora_alpha=config.r, use_rslora=False).with_source("recomputed")
