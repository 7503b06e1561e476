"""LoftQ: LoRA-fine-tuning-aware quantization (Li et al. 2023, arXiv:2310.08659).

    A_0 = B_0 = 0;   for t = 1 ... T:   Q_t = Q(W - s B_{t-1} A_{t-1}),   s B_t A_t = the r leading triplets of W - Q_t
    y = x Q_T^T + s (dropout(x) A^T) B^T,   A = A_T, B = B_T at the start

LoftQ is a LoRA on a quantized base. A and B start as the leading singular triplets of the quantization error, so the
initial model is closer to the full-precision model than the quantized base is. As in Hugging Face PEFT, A and B are
both multiplied by the square roots of the singular values.

| base | initialization |
| --- | --- |
| quantized, T = 1 | the base is Q(W), so the adapter fits every base that was quantized in the same format |
| quantized, T > 1 | the base is Q(W - s B_{T-1} A_{T-1}); the adapter stores A_{T-1} and B_{T-1} |
| full precision | there is no quantization error, so A and B start as in LoRA |

Files contain a plain LoRA of rank 2r (`lora/subtracted_init.py`) for the quantized base if T = 1, and for the original
base if T > 1.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.peft.lora.init_before_quantization import (
    SVD_CHOICES,
    InitBeforeQuantizationConfig,
    InitialFactors,
    principal_factors,
)
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.lora.subtracted_init import LoRALinearWithInit
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.quantize_weight import QuantizeDequantize
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear


@PEFT_METHODS.register("loftq")
@dataclass(kw_only=True)
class LoftQConfig(InitBeforeQuantizationConfig):
    """Options of LoftQ: LoRA on a quantized base, initialized with the quantization error.

    >>> LoftQConfig(r=8, iters=3).svd
    'fast'
    """

    variant: ClassVar[str] = "loftq"
    recorded_options: ClassVar[tuple[str, ...]] = ("iters", "svd")
    missing_init_reason: ClassVar[str] = (
        "depends on a base that PEFT quantized, and the file does not contain this base; merge the adapter in PEFT, or "
        "train the adapter again"
    )
    needs_quantized_base: ClassVar[bool] = True
    free_on_resume: ClassVar[frozenset[str]] = LowRankConfig.free_on_resume | {"svd"}

    iters: int = option(
        1,
        help="LoftQ: number of iterations; each iteration quantizes the weight and computes an SVD of the error",
        key="loftq_iters",
        minimum=1,
        maximum=100,
    )
    svd: str = option(
        "fast", help="LoftQ: SVD algorithm: fast (randomized) or exact (full)", choices=SVD_CHOICES, key="loftq_svd"
    )

    @property
    def corrects_quantization(self) -> bool:
        """Return whether `iters` is 1. With more iterations, the stored update is relative to the original weights."""
        return self.iters == 1

    def find_initial_factors(
        self, name: str, weight: paddle.Tensor, quantize_dequantize: QuantizeDequantize
    ) -> InitialFactors:
        rank, scaling = self.rank_and_scaling(name)
        a, b = paddle.zeros([rank, weight.shape[1]]), paddle.zeros([weight.shape[0], rank])
        removed_a, removed_b = a, b
        for _ in range(self.iters):
            removed_a, removed_b = a, b
            error = weight - quantize_dequantize(weight - scaling * paddle.matmul(b, a))
            a, b = principal_factors(error, rank, scaling, name, exact=self.svd == "exact")
        return InitialFactors(a, b, removed_a, removed_b)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LoRALinearWithInit:
        if isinstance(base, QuantizedLinear):
            return self.wrap_quantized(name, base, seed)
        rank, scaling = self.rank_and_scaling(name)
        return LoRALinearWithInit(base, rank, scaling, self.lora_dropout, seed, name)
