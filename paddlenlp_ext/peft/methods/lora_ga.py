"""LoRA-GA: Low-Rank Adaptation with Gradient Approximation (Wang et al. 2024, arXiv:2407.05000).

    G = gradient of the loss with respect to W, summed over a few batches = U S V^T
    A0 = f V_[1..r]^T,  B0 = f U_[r+1..2r],  f = out^(1/4) / sqrt(gamma)
    y = x (W - s B0 A0)^T + s (dropout(x) A^T) B^T

A and B start as singular vectors of G, so that the first step changes W along the best rank-2r approximation of the
gradient of full fine-tuning. s B0 A0 is subtracted, so the initial model equals its base (`lora/subtracted_init.py`).
f is the paper's scale for stable activations (theorem 3.2).

`before_training` sums the gradients of the first batches, layer by layer in host memory during the backward pass. The
weights need no gradient tensors. Training uses these batches again. Before `before_training`, A and B have the initial
values of LoRA. Files contain a plain LoRA of rank 2r for the original base.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import adapter_layers_of
from paddlenlp_ext.peft.leading_svd import leading_svd, require_triplets
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.lora.subtracted_init import LoRALinearWithInit, SubtractedInitConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


class LoRAGAAdapter(Adapter):
    """Adapter that is initialized from the gradients of the first batches of a new run."""

    peft_config: LoRAGAConfig

    def before_training(self, run_batch: Callable[[], None]) -> None:
        """Initialize A and B of every layer from the gradient of its weight.

        Args:
            run_batch: function that runs the forward and backward pass of the next batch.

        Raises:
            ValueError: a gradient is not finite, or a layer has fewer features than the rank.
        """
        if self.peft_config.path:
            return  # a stored adapter is already initialized
        layers = {name: layer for name, layer in adapter_layers_of(self.base_model, LoRAGALinear) if layer.is_on_stage}
        for layer in layers.values():
            layer.gradient = GradientSum(layer.out_features, layer.in_features)
        for _ in range(self.peft_config.ga_batches):
            run_batch()
        for name, layer in layers.items():
            gradient, layer.gradient = layer.gradient, None
            assert gradient is not None
            gradient_OI = layer.full_gradient(gradient.total)
            layer.set_initial_factors(
                *gradient_factors(gradient_OI, layer.rank, self.peft_config.ga_stable_gamma, name)
            )
        logger.info(
            "LoRA-GA: initialized %d layers from their gradients on %d batches",
            len(layers),
            self.peft_config.ga_batches,
        )


@PEFT_METHODS.register("lora_ga")
@dataclass(kw_only=True)
class LoRAGAConfig(SubtractedInitConfig):
    """Options of LoRA-GA: LoRA initialized from the gradient of a few batches.

    >>> LoRAGAConfig(r=8, ga_batches=4).ga_stable_gamma
    16.0
    """

    variant: ClassVar[str] = "lora_ga"
    missing_init_reason: ClassVar[str] = (
        "computes initial factors from gradients, and the file does not contain these factors; save the adapter from "
        "PEFT as a plain LoRA, with path_initial_model_for_weight_conversion"
    )
    adapter_class: ClassVar[type[TrainingHooks] | None] = LoRAGAAdapter
    free_on_resume: ClassVar[frozenset[str]] = LowRankConfig.free_on_resume | {"ga_batches", "ga_stable_gamma"}

    ga_batches: int = option(8, help="LoRA-GA: number of micro-batches whose gradients are summed", minimum=1)
    ga_stable_gamma: float = option(
        16.0, help="LoRA-GA: gamma; the initial A and B are scaled by out_features^(1/4) / sqrt(gamma)", above=0
    )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LoRAGALinear:
        rank, scaling = self.rank_and_scaling(name)
        return LoRAGALinear(base, rank, scaling, self.lora_dropout, seed, name)

    def warm_start(self, stored: PeftConfig) -> LowRankConfig:
        config = super().warm_start(stored)
        return config.replace(ga_batches=self.ga_batches, ga_stable_gamma=self.ga_stable_gamma)


class GradientSum:
    """Gradient of one weight, summed over batches: `total`, float32 [out, in], in host memory."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self.total = paddle.zeros([out_features, in_features], "float32").cpu()

    @paddle.no_grad()
    def add(self, gradient: paddle.Tensor, x: paddle.Tensor) -> None:
        """Add dL/dW = (dL/dy)^T x of a batch.

        Args:
            gradient: dL/dy [..., out].
            x: input of the layer [..., in].
        """
        gradient_TO = gradient.reshape([-1, self.total.shape[0]]).astype("float32")
        x_TI = x.reshape([-1, self.total.shape[1]]).astype("float32")
        self.total.add_(paddle.matmul(gradient_TO, x_TI, transpose_x=True).cpu())


class LoRAGALinear(LoRALinearWithInit):
    """Linear layer with a low-rank update initialized from a gradient; arguments as in `LoRALinearWithInit`.

    Attributes:
        gradient: sum of dL/dW while `before_training` runs; otherwise None.
    """

    gradient: GradientSum | None = None

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = super().adapter_forward(x)
        if self.gradient is not None and not y.stop_gradient:
            y.register_hook(partial(_collect, self.gradient, x.detach()))
        return y

    def full_gradient(self, shard: paddle.Tensor) -> paddle.Tensor:
        """Return the gradient of the unsharded weight: gather shards, or sum the gradients of a replicated weight."""
        if self.shard_group is None:
            return shard
        if self.style == "replicated":
            return self.shard_group.all_reduce(shard)
        return self.shard_group.all_gather(shard, 0 if self.style == "colwise" else 1)


def _collect(total: GradientSum, x: paddle.Tensor, gradient: paddle.Tensor) -> None:
    total.add(gradient, x)


def gradient_factors(
    gradient: paddle.Tensor, rank: int, gamma: float, name: str
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return A0 [r, in] and B0 [out, r] for a gradient [out, in].

    If the gradient has fewer than 2r singular triplets (few key-value heads, or a large rank), B0 uses the last r.

    Args:
        gradient: float32 [out, in].
        rank: r.
        gamma: gamma in the scale f.
        name: dotted name of the layer; seed of the randomized SVD.

    Raises:
        ValueError: the gradient is not finite or has fewer than r singular triplets.
    """
    available = min(gradient.shape)
    require_triplets(rank, gradient.shape, name)
    if not bool(paddle.isfinite(gradient).all()):
        raise ValueError(f"{name}: the gradient of the first batches is not finite; check the first rows of the data")
    last = min(2 * rank, available)
    u, _, v_t = leading_svd(gradient, last, name)
    scale = gradient.shape[0] ** 0.25 / gamma**0.5
    return v_t[:rank] * scale, u[:, last - rank : last] * scale
