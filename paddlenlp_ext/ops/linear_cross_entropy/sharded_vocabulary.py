"""Cross entropy of an lm_head whose vocabulary is sharded over processes.

    loss = m + log(sum over all shards of sum_u exp(x[u] - m)) - x[label],       m: largest logit of all shards

Each process computes the largest logit, the sum of exponentials and the label's logit for the local shard.
`VocabShards` combines the results of all processes.

Shapes: R rows of a chunk, U size of the local shard of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.linear_cross_entropy.chunks import PADDLE, Products
from paddlenlp_ext.ops.linear_cross_entropy.reference import with_soft_cap


class VocabShards(Protocol):
    """Collectives over the processes among which the vocabulary is sharded."""

    @property
    def start(self) -> int:
        """First token id of this process's shard."""

    @property
    def largest_size(self) -> int:
        """Number of rows of the largest shard."""

    def largest(self, largest_R: paddle.Tensor, first_R: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the largest logit over all shards and its token id; in a tie, the lowest token id.

        Args:
            largest_R: largest logit of each row in the local shard.
            first_R: int64, first column of the largest logit in the local shard.
        """

    def sum(self, values: paddle.Tensor) -> paddle.Tensor:
        """All-reduce `values` (sum) in place, and return `values`."""


def sharded_products_reference(shards: VocabShards) -> Products:
    """Return the matmuls and the cross entropy of an lm_head with a sharded vocabulary, in plain Paddle."""

    def cross_entropy(
        logits_RU: paddle.Tensor, labels_R: paddle.Tensor, with_gradient: bool, _: object, softcap: float | None
    ) -> tuple[paddle.Tensor, int]:
        return with_soft_cap(logits_RU, softcap, lambda: _cross_entropy(shards, logits_RU, labels_R))

    return dataclasses.replace(PADDLE, cross_entropy=cross_entropy, complete_hidden=shards.sum)


def _cross_entropy(shards: VocabShards, logits_RU: paddle.Tensor, labels_R: paddle.Tensor) -> tuple[paddle.Tensor, int]:
    """Return the losses [R] and the number of correct predictions; overwrite the logits with their gradient."""
    num_columns = logits_RU.shape[1]
    is_own_R = ((labels_R >= shards.start) & (labels_R < shards.start + num_columns)).astype("float32")
    own_labels_R1 = paddle.clip(labels_R - shards.start, 0, num_columns - 1).unsqueeze(1)
    picked_R = paddle.take_along_axis(logits_RU, own_labels_R1, axis=1).squeeze(1) * is_own_R
    largest_R, first_R = shards.largest(logits_RU.max(axis=1), logits_RU.argmax(axis=1))
    exponentials_RU = logits_RU.subtract_(largest_R.unsqueeze(1)).exp_()
    sums_2R = shards.sum(paddle.stack([_row_sums(exponentials_RU), picked_R]))
    gradient_RU = exponentials_RU.divide_(sums_2R[0].unsqueeze(1))
    gradient_RU.put_along_axis_(own_labels_R1, -is_own_R.unsqueeze(1), axis=1, reduce="add")
    return sums_2R[0].log() + largest_R - sums_2R[1], int((first_R == labels_R).sum())


def _row_sums(values_RU: paddle.Tensor) -> paddle.Tensor:
    """Return the row sums [R], summed in blocks: Paddle's sequential sum on the CPU is less accurate."""
    width = 256
    missing = -values_RU.shape[1] % width
    blocks = F.pad(values_RU, [0, missing]) if missing else values_RU
    return blocks.reshape([values_RU.shape[0], -1, width]).sum(axis=2).sum(axis=1)
