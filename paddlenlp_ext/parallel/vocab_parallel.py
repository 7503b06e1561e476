"""Vocabulary-parallel embedding, lm_head and cross entropy.

Shapes: T positions, R target positions per chunk, D hidden, V vocabulary, U vocabulary shard of this rank, K rank of a
low-rank update.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddlenlp_ext.ops.embedding import embedding
from paddlenlp_ext.ops.linear_cross_entropy import sharded_products_op
from paddlenlp_ext.ops.linear_cross_entropy.chunks import (
    Updates,
    logprobs_of_losses,
    losses_by_chunks,
    sum_of_losses,
)
from paddlenlp_ext.parallel.collectives import all_gather_cat
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.sharding_spec import Shard


class VocabParallelEmbedding(nn.Layer):
    """Token embedding sharded along the vocabulary; every rank returns the embeddings of all tokens.

    Args:
        weight: rows of the embedding that this rank holds, [U, D].
        shard: slice of the vocabulary that this rank holds.
        axis: mesh axis of the tensor-parallel ranks.
    """

    def __init__(self, weight: paddle.Tensor, shard: Shard, axis: ProcessAxis) -> None:
        super().__init__()
        self.weight, self._shard, self._axis = weight, shard, axis

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Return the embeddings [..., D] of token ids [...]."""
        return self.lookup(self.weight, input_ids)

    def lookup(self, table: paddle.Tensor, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Return the rows [..., K] of token ids [...] from a table with one row per token of the vocabulary.

        Each rank returns zeros for the ids outside its shard, and an all-reduce sums the results of all ranks.

        Args:
            table: rows of the table that this rank holds, [U, K].
            input_ids: token ids.
        """
        is_own = (input_ids >= self._shard.start) & (input_ids < self._shard.stop)
        own_ids = paddle.where(is_own, input_ids - self._shard.start, paddle.zeros_like(input_ids))
        vectors = embedding(table, own_ids)
        return self._axis.all_reduce(vectors * is_own.unsqueeze(-1).astype(vectors.dtype))


class VocabParallelHead:
    """Logits and loss for an lm_head that is sharded along the vocabulary (`models.causal_lm.ShardedLMHead`).

    Args:
        shard: slice of the vocabulary that this rank holds.
        sizes: number of tokens in the shard of each rank.
        axis: mesh axis of the tensor-parallel ranks.
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
        chunk: int | None = None,
        softcap: float | None = None,
        updates: Updates = (),
    ) -> tuple[paddle.Tensor, int]:
        """Return the result of `ops.linear_cross_entropy`: the sum of the losses and the number of correct predictions.

        Args:
            hidden_TD: hidden states.
            weight_UD: rows of the lm_head that this rank holds.
            labels_T: target ids in the full vocabulary; -100 is ignored.
            chunk: positions per chunk, which bounds the memory of the logits; None for the default of the backend.
            softcap: soft cap of the logits; None for no cap.
            updates: low-rank updates u B^T of the logits, as pairs of u [T, K], equal on all ranks, and the rows of B
                that this rank holds, [U, K].
        """
        return sum_of_losses(partial(self._losses, softcap=softcap), hidden_TD, weight_UD, labels_T, chunk, updates)

    def token_logprobs(
        self,
        hidden_TD: paddle.Tensor,
        weight_UD: paddle.Tensor,
        labels_T: paddle.Tensor,
        chunk: int | None = None,
        softcap: float | None = None,
        updates: Updates = (),
    ) -> paddle.Tensor:
        """Return the result of `ops.linear_cross_entropy.token_logprobs`: the log-probability of each label.

        See `cross_entropy` for the arguments.
        """
        losses = partial(self._losses, softcap=softcap)
        return logprobs_of_losses(losses, hidden_TD, weight_UD, labels_T, chunk, updates)

    def _losses(self, hidden_RD: paddle.Tensor, *arguments: Any, softcap: float | None) -> tuple[paddle.Tensor, int]:
        products = sharded_products_op.choose(hidden_RD)(self)
        return losses_by_chunks(products, hidden_RD, *arguments, softcap=softcap)

    # -- interface `VocabShards` of ops/linear_cross_entropy/sharded_vocabulary.py; a chunk calls three all-reduces ---
    @property
    def start(self) -> int:
        """First token id of the shard of this rank."""
        return self.shard.start

    @property
    def largest_size(self) -> int:
        """Number of rows of the largest shard."""
        return max(self.sizes)

    def largest(self, largest_R: paddle.Tensor, first_R: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the largest logit over all ranks and its token id; if several logits are equal, the lowest id.

        Args:
            largest_R: largest logit in the shard of this rank.
            first_R: index of the largest logit in the shard of this rank.
        """
        overall_R = largest_R.clone()
        dist.all_reduce(overall_R, op=dist.ReduceOp.MAX, group=self.axis.group)
        none_R = paddle.full_like(first_R, sum(self.sizes))
        ids_R = paddle.where(largest_R == overall_R, first_R + self.shard.start, none_R)
        dist.all_reduce(ids_R, op=dist.ReduceOp.MIN, group=self.axis.group)
        return overall_R, ids_R

    def sum(self, values: paddle.Tensor) -> paddle.Tensor:
        """All-reduce `values` in place and return them."""
        dist.all_reduce(values, group=self.axis.group)
        return values
