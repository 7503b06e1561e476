"""Routers of expert layers: choose the top-k experts of each token, and compute their weights.

    logits --> scores --> the k experts with the highest scores --> weights of the chosen experts

| router | scores | chosen by | weights | families |
| --- | --- | --- | --- | --- |
| softmax | softmax(logits) | scores + correction bias | scores, optionally normalized | Mixtral, Qwen, ERNIE |
| sigmoid | sigmoid(logits) | scores + correction bias | scores, optionally normalized | DeepSeek V3, GLM-4.5 |
| softmax_of_chosen | logits | scores | softmax over the chosen logits | gpt-oss |

The choice may be limited to the best groups of experts (DeepSeek V2, arXiv:2405.04434, and V3, arXiv:2412.19437). In a
tie, the expert with the lowest index is chosen. All routers compute in float32.

Shapes: T tokens, E experts, K chosen experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from paddlenlp_ext.ops.cpp.bf16 import activation_dtype


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Options of a router.

    Attributes:
        kind: a key of `ROUTERS`.
        top_k: experts per token.
        normalizes: whether the weights of a token's experts are divided by their sum.
        smallest_sum: lower bound of the sum by which the weights are divided.
        sum_offset: number that is added to the sum of the selected weights before the division.
        scale: factor of the weights.
        num_groups: number of groups of consecutive experts, of equal size; 1: the choice is not limited.
        chosen_groups: number of groups that a token's experts may come from.
        group_score: score of a group: its highest score ("max"), or the sum of its two highest scores ("top2").
        bias: whether the logits have a bias.
        correction_dims: number of dimensions of the stored correction bias, 1 for [E] or 2 for [1, E]; 0: no bias.
            The correction bias changes only which experts are chosen, and has no gradient.
    """

    kind: str
    top_k: int
    normalizes: bool = True
    smallest_sum: float = 1e-20
    sum_offset: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    chosen_groups: int = 1
    group_score: str = "max"
    bias: bool = False
    correction_dims: int = 0


Route = Callable[[paddle.Tensor, RouterOptions, "paddle.Tensor | None"], tuple[paddle.Tensor, paddle.Tensor]]
"""Function from logits [T, E], options and correction bias to weights [T, K] and experts [T, K]."""


def softmax(
    logits_TE: paddle.Tensor, options: RouterOptions, correction: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Choose and weight experts by the softmax over all experts (Mixtral, arXiv:2401.04088)."""
    return _weigh_chosen(F.softmax(logits_TE, axis=-1), options, correction)


def sigmoid(
    logits_TE: paddle.Tensor, options: RouterOptions, correction: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Choose and weight experts by the sigmoid of each logit (DeepSeek V3, arXiv:2412.19437)."""
    return _weigh_chosen(F.sigmoid(logits_TE), options, correction)


def softmax_of_chosen(
    logits_TE: paddle.Tensor, options: RouterOptions, correction: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Choose experts by their logits, and weight the chosen experts by the softmax over their logits (gpt-oss)."""
    experts_TK = choose(logits_TE, options, correction)
    return F.softmax(paddle.take_along_axis(logits_TE, experts_TK, 1), axis=-1), experts_TK


ROUTERS: dict[str, Route] = {"softmax": softmax, "sigmoid": sigmoid, "softmax_of_chosen": softmax_of_chosen}


@paddle.no_grad()
def choose(scores_TE: paddle.Tensor, options: RouterOptions, correction: paddle.Tensor | None) -> paddle.Tensor:
    """Return the experts [T, K] with the highest scores, sorted by descending score, within the best groups."""
    if correction is not None:
        scores_TE = scores_TE + correction
    if options.num_groups > 1:
        tokens, experts = scores_TE.shape
        grouped_TGM = scores_TE.reshape([tokens, options.num_groups, experts // options.num_groups])
        best = paddle.topk(grouped_TGM, 1 if options.group_score == "max" else 2, axis=-1)[0].sum(-1)
        chosen_TG = F.one_hot(_highest(best, options.chosen_groups), options.num_groups).sum(1)
        excluded = paddle.full_like(grouped_TGM, float("-inf"))
        scores_TE = paddle.where(chosen_TG.unsqueeze(-1) > 0, grouped_TGM, excluded).reshape([tokens, experts])
    return _highest(scores_TE, options.top_k)


def _highest(scores: paddle.Tensor, count: int) -> paddle.Tensor:
    """Return the indices of the highest scores of each row; ties go to the lowest index."""
    return paddle.argsort(scores, axis=-1, descending=True, stable=True)[:, :count]


def _weigh_chosen(
    scores_TE: paddle.Tensor, options: RouterOptions, correction: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the weights and indices of the chosen experts; `options` determines whether weights are normalized."""
    experts_TK = choose(scores_TE, options, correction)
    weights_TK = paddle.take_along_axis(scores_TE, experts_TK, 1)
    if options.normalizes:
        sum_T1 = weights_TK.sum(-1, keepdim=True).clip(min=options.smallest_sum)
        weights_TK = weights_TK / (sum_T1 if options.sum_offset == 0.0 else sum_T1 + options.sum_offset)
    return (weights_TK if options.scale == 1.0 else weights_TK * options.scale), experts_TK


class Router(nn.Layer):
    """Router of an expert layer: a linear layer from hidden states to logits, and a function of `ROUTERS`.

    In a bfloat16 model on the CPU, the router's parameters are float32, because rounding to bfloat16 could change which
    experts are chosen. In other models, the router's parameters have the dtype of the model's weights.

    Attributes:
        observe: function that records the logits and returns them (nn/load_balancing_loss.py); None: not recorded.
    """

    def __init__(self, hidden_size: int, num_experts: int, options: RouterOptions) -> None:
        super().__init__()
        self.options = options
        self.observe: Callable[[paddle.Tensor], paddle.Tensor] | None = None
        zeros: Any = nn.initializer.Constant()
        dtype = activation_dtype(paddle.get_default_dtype())
        self.weight = self.create_parameter([num_experts, hidden_size], dtype=dtype, default_initializer=zeros)
        self.bias = self.create_parameter([num_experts], dtype=dtype, is_bias=True) if options.bias else None
        self.e_score_correction_bias = None
        if options.correction_dims:
            shape = [*(1,) * (options.correction_dims - 1), num_experts]
            self.e_score_correction_bias = self.create_parameter(shape, dtype="float32", default_initializer=zeros)
            self.e_score_correction_bias.stop_gradient = True

    def forward(
        self, x_TD: paddle.Tensor, update_TE: paddle.Tensor | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the weights [T, K] of the chosen experts, float32, and their indices [T, K], int64.

        `update_TE`, float32, is added to the logits.
        """
        with paddle.amp.auto_cast(enable=False):
            logits_TE = paddle.matmul(x_TD.astype("float32"), self.weight.astype("float32"), transpose_y=True)
            if self.bias is not None:
                logits_TE = logits_TE + self.bias.astype("float32")
            if update_TE is not None:
                logits_TE = logits_TE + update_TE
            if self.observe is not None:
                logits_TE = self.observe(logits_TE)
            return ROUTERS[self.options.kind](logits_TE, self.options, self.e_score_correction_bias)
