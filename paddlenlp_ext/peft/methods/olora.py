"""OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models (Büyükakyüz 2024, arXiv:2406.01775).

    W = Q R        A0 = R_r / sqrt(s),  B0 = Q_r / sqrt(s),  s B0 A0 = Q_r R_r
    y = x (W - s B0 A0)^T + s (dropout(x) A^T) B^T

OLoRA is a LoRA that starts from the QR decomposition of each weight. Q_r is an orthonormal basis of the first r columns
of W, and R_r = Q_r^T W. s is 1 unless `lora_alpha` is set. Hugging Face PEFT starts with A0 = R_r and B0 = Q_r, and
subtracts s Q_r R_r. When a file of PEFT (`init_lora_weights: "olora"`) is loaded, A0 and B0 are recomputed from the
base in PEFT's form.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import paddle

from paddlenlp_ext.peft.leading_svd import require_finite, require_triplets
from paddlenlp_ext.peft.lora.init_from_weights import InitFromWeightsConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS


@PEFT_METHODS.register("olora")
@dataclass(kw_only=True)
class OLoRAConfig(InitFromWeightsConfig):
    """Options of OLoRA: LoRA initialized with the QR decomposition of each weight.

    >>> OLoRAConfig(r=4).lora_alpha
    4
    """

    variant: ClassVar[str] = "olora"
    missing_init_reason: ClassVar[str] = "is not known; PEFT's name is 'olora'"

    def factors_of_weight(self, name: str, weight: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        rank, scaling = self.rank_and_scaling(name)
        require_triplets(rank, weight.shape, name)
        require_finite(weight, name)
        a, b = orthonormal_factors(weight, rank)
        root = 1.0 if self.factors_source == "recomputed" else scaling**0.5
        return a / root, b / root


@paddle.no_grad()
def orthonormal_factors(weight: paddle.Tensor, rank: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return R_r [r, in] and Q_r [out, r] of the QR decomposition of a weight, float32 [out, in].

    Q_r depends only on the first r columns, so only these columns are decomposed (in float64).
    """
    weight = weight.astype("float64")
    q, _ = paddle.linalg.qr(weight[:, :rank])
    return paddle.matmul(q, weight, transpose_x=True).astype("float32"), q.astype("float32")
