"""Embedding, lm_head and cross entropy, sharded along the vocabulary.

Shapes: T positions, R target positions of one chunk, D hidden, V vocabulary, U this rank's shard of V, K rank of an
adapter's update.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn

from paddlenlp_ext.ops.embedding import embedding
from paddlenlp_ext.ops.linear_cross_entropy.cross_entropy import with_soft_cap
from paddlenlp_ext.ops.linear_cross_entropy.products import (
    PADDLE,
    Products,
    Updates,
    logprobs_of_losses,
    losses_by_chunks,
    sum_of_losses,
)
from paddlenlp_ext.parallel.collectives import all_gather_cat, reduce_from_group
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.sharding_spec import Shard


class VocabParallelEmbedding(nn.Layer):
    """Token embedding of which each rank holds some rows; every rank returns full vectors.

    Args:
        weight: this rank's rows [U, D].
        shard: the slice of rows.
        axis: the tensor-parallel ranks.
    """

    def __init__(self, weight: paddle.Tensor, shard: Shard, axis: ProcessAxis) -> None:
        super().__init__()
        self.weight, self._shard, self._axis = weight, shard, axis

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Map ids [...] to vectors [..., D]."""
        return self.lookup(self.weight, input_ids)

    def lookup(self, table: paddle.Tensor, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Map ids [...] to rows [..., K] of a table, of which this rank holds the same rows [U, K] as of the weight.

        Local rows are looked up, zeros stand for the others, and the ranks' results are all-reduced.
        """
        is_own = (input_ids >= self._shard.start) & (input_ids < self._shard.stop)
        own_ids = paddle.where(is_own, input_ids - self._shard.start, paddle.zeros_like(input_ids))
        vectors = embedding(table, own_ids)
        return reduce_from_group(vectors * is_own.unsqueeze(-1).astype(vectors.dtype), self._axis.group)


class VocabParallelHead:
    """Logits and loss of an lm_head whose rows are sharded; implements `models.causal_lm.ShardedLMHead`.

    Args:
        shard: this rank's slice of rows.
        sizes: number of rows of every rank.
        axis: the tensor-parallel ranks.
    """

    def __init__(self, shard: Shard, sizes: list[int], axis: ProcessAxis) -> None:
        self.shard, self.sizes, self.axis = shard, sizes, axis

    def join(self, logits_U: paddle.Tensor) -> paddle.Tensor:
        """Gather logits [..., U] to [..., V]; not differentiable."""
        return all_gather_cat(logits_U, logits_U.ndim - 1, self.sizes, self.axis.group)

    def cross_entropy(
        self,
        hidden_TD: paddle.Tensor,
        weight_UD: paddle.Tensor,
        labels_T: paddle.Tensor,
        chunk: int = 256,
        softcap: float | None = None,
        updates: Updates = (),
    ) -> tuple[paddle.Tensor, int]:
        """Return the summed loss and the number of correct predictions, as `ops.linear_cross_entropy` does.

        Args:
            hidden_TD: hidden states.
            weight_UD: this rank's rows of the lm_head.
            labels_T: target ids of the full vocabulary; -100 is ignored.
            chunk: positions per chunk, which bounds the memory of the logits.
            softcap: bound of the logits; None: no bound.
            updates: pairs of u [T, K], equal on all ranks, and this rank's rows of B, [U, K].
        """
        return sum_of_losses(partial(self._losses, softcap=softcap), hidden_TD, weight_UD, labels_T, chunk, updates)

    def token_logprobs(
        self,
        hidden_TD: paddle.Tensor,
        weight_UD: paddle.Tensor,
        labels_T: paddle.Tensor,
        chunk: int = 256,
        softcap: float | None = None,
        updates: Updates = (),
    ) -> paddle.Tensor:
        """Return the log-probability of each label, as `ops.linear_cross_entropy.token_logprobs` does."""
        losses = partial(self._losses, softcap=softcap)
        return logprobs_of_losses(losses, hidden_TD, weight_UD, labels_T, chunk, updates)

    def _losses(self, *arguments: Any, softcap: float | None) -> tuple[paddle.Tensor, int]:
        return losses_by_chunks(self._products, *arguments, softcap=softcap)

    @cached_property
    def _products(self) -> Products:
        """Matmuls with this rank's rows; each chunk needs three all-reduces: maximum logits, argmax, and sums."""
        return dataclasses.replace(
            PADDLE,
            cross_entropy=lambda logits_RU, labels_R, with_gradient, _, softcap: with_soft_cap(
                logits_RU, softcap, lambda: self._cross_entropy_(logits_RU, labels_R)
            ),
            complete_hidden=lambda gradient_RD: dist.all_reduce(gradient_RD, group=self.axis.group),
        )

    def _cross_entropy_(self, logits_RU: paddle.Tensor, labels_R: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """Return the losses [R] and the number of correct predictions; the gradient overwrites the logits."""
        group, start = self.axis.group, self.shard.start
        is_own_R = ((labels_R >= start) & (labels_R < self.shard.stop)).astype("float32")
        own_labels_R1 = paddle.clip(labels_R - start, 0, logits_RU.shape[1] - 1).unsqueeze(1)
        picked_R = paddle.take_along_axis(logits_RU, own_labels_R1, axis=1).squeeze(1) * is_own_R
        own_largest_R = logits_RU.max(axis=1)
        largest_R = own_largest_R.clone()
        dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=group)
        # Like argmax, the first of several equal logits counts as the largest.
        first_R = paddle.where(
            own_largest_R == largest_R, logits_RU.argmax(axis=1) + start, paddle.full_like(labels_R, sum(self.sizes))
        )
        dist.all_reduce(first_R, op=dist.ReduceOp.MIN, group=group)
        exponentials_RU = logits_RU.subtract_(largest_R.unsqueeze(1)).exp_()
        sums_2R = paddle.stack([_row_sums(exponentials_RU), picked_R])
        dist.all_reduce(sums_2R, group=group)
        gradient_RU = exponentials_RU.divide_(sums_2R[0].unsqueeze(1))
        gradient_RU.put_along_axis_(own_labels_R1, -is_own_R.unsqueeze(1), axis=1, reduce="add")
        return sums_2R[0].log() + largest_R - sums_2R[1], int((first_R == labels_R).sum())


def _row_sums(values_RU: paddle.Tensor) -> paddle.Tensor:
    """Return row sums [R], added up in blocks: Paddle's sum on the CPU adds sequentially, which is less accurate."""
    width = 256
    missing = -values_RU.shape[1] % width
    blocks = F.pad(values_RU, [0, missing]) if missing else values_RU
    return blocks.reshape([values_RU.shape[0], -1, width]).sum(axis=2).sum(axis=1)
