"""Embedding, lm_head and cross entropy, sharded along the vocabulary.

Shapes: T positions, R target positions of one chunk, D hidden, V vocabulary, U this rank's shard of V.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.embedding import embedding
from paddlenlp_ext.parallel.collectives import all_gather_cat, reduce_from_group
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.sharding_spec import Shard
from paddlenlp_ext.utils.labels import IGNORED_LABEL


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
        """Map ids [...] to vectors [..., D]: look up local rows, zeros for others, then all-reduce."""
        is_own = (input_ids >= self._shard.start) & (input_ids < self._shard.stop)
        own_ids = paddle.where(is_own, input_ids - self._shard.start, paddle.zeros_like(input_ids))
        vectors = embedding(self.weight, own_ids)
        return reduce_from_group(vectors * is_own.unsqueeze(-1).astype(vectors.dtype), self._axis.group)


class VocabParallelHead:
    """Logits and loss of an lm_head whose rows are sharded; implements `models.decoder.ShardedLMHead`.

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
        self, hidden_TD: paddle.Tensor, weight_UD: paddle.Tensor, labels_T: paddle.Tensor, chunk: int = 256
    ) -> tuple[paddle.Tensor, int]:
        """Return the summed loss and the number of correct predictions, as `ops.linear_cross_entropy` does.

        Args:
            hidden_TD: hidden states.
            weight_UD: this rank's rows of the lm_head.
            labels_T: target ids of the full vocabulary; -100 is ignored.
            chunk: positions per chunk, which bounds the memory of the logits.
        """
        target_positions_R = paddle.nonzero(labels_T != IGNORED_LABEL).flatten()
        labels_R, hidden_RD = paddle.gather(labels_T, target_positions_R), paddle.gather(hidden_TD, target_positions_R)
        if target_positions_R.shape[0] == 0:
            return hidden_TD[:0].astype("float32").sum() + weight_UD[:0].astype("float32").sum(), 0
        counter = [0]
        with paddle.amp.auto_cast(enable=False):
            needs_grad = paddle.is_grad_enabled()
            loss = _CrossEntropy.apply(hidden_RD, weight_UD, labels_R, self, chunk, needs_grad, counter)
        return loss, counter[0]


class _CrossEntropy(PyLayer):
    """Loss in chunks of positions, with three all-reduces per chunk: maximum logits, argmax, and sums."""

    @staticmethod
    def forward(ctx, hidden_RD, weight_UD, labels_R, head, chunk, needs_grad, counter):
        hidden_needs_grad = needs_grad and not hidden_RD.stop_gradient
        weight_needs_grad = needs_grad and not weight_UD.stop_gradient
        loss, hidden_gradients, weight_gradient = paddle.zeros([], "float32"), [], None
        weight = weight_UD.astype(hidden_RD.dtype)
        for start in range(0, hidden_RD.shape[0], chunk):
            rows_RD = hidden_RD[start : start + chunk]
            logits_RU = paddle.matmul(rows_RD, weight, transpose_y=True).astype("float32")
            gradient_RU, losses_R, num_correct = _chunk(logits_RU, labels_R[start : start + chunk], head)
            loss += losses_R.sum()
            counter[0] += num_correct
            gradient_RU = gradient_RU.astype(hidden_RD.dtype)
            if hidden_needs_grad:
                hidden_gradients.append(paddle.matmul(gradient_RU, weight))
            if weight_needs_grad:
                part_UD = paddle.matmul(gradient_RU, rows_RD, transpose_x=True).astype("float32")
                weight_gradient = part_UD if weight_gradient is None else weight_gradient.add_(part_UD)
        hidden_gradient = None
        if hidden_needs_grad:
            hidden_gradient = paddle.concat(hidden_gradients)
            dist.all_reduce(hidden_gradient, group=head.axis.group)
        ctx.gradients = (hidden_gradient, None if weight_gradient is None else weight_gradient.astype(weight_UD.dtype))
        return loss

    @staticmethod
    def backward(ctx, loss_gradient):
        scaled = [None if part is None else part * loss_gradient.astype(part.dtype) for part in ctx.gradients]
        return (*scaled, None)


def _chunk(
    logits_RU: paddle.Tensor, labels_R: paddle.Tensor, head: VocabParallelHead
) -> tuple[paddle.Tensor, paddle.Tensor, int]:
    """Return the gradient of the logits [R, U], the losses [R] and the number of correct predictions."""
    group, start = head.axis.group, head.shard.start
    is_own_R = ((labels_R >= start) & (labels_R < head.shard.stop)).astype("float32")
    own_labels_R = paddle.clip(labels_R - start, 0, logits_RU.shape[1] - 1)
    largest_R = own_largest_R = logits_RU.max(axis=1)
    largest_R = largest_R.clone()
    dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=group)
    exponentials_RU = (logits_RU - largest_R.unsqueeze(1)).exp()
    picked_R = paddle.take_along_axis(logits_RU, own_labels_R.unsqueeze(1), axis=1).squeeze(1) * is_own_R
    # Like argmax, the first of several equal logits counts as the largest.
    first_R = paddle.where(
        own_largest_R == largest_R, logits_RU.argmax(axis=1) + start, paddle.full_like(labels_R, head.shard.size)
    )
    dist.all_reduce(first_R, op=dist.ReduceOp.MIN, group=group)
    sums_2R = paddle.stack([_row_sums(exponentials_RU), picked_R])
    dist.all_reduce(sums_2R, group=group)
    losses_R = sums_2R[0].log() + largest_R - sums_2R[1]
    gradient_RU = exponentials_RU / sums_2R[0].unsqueeze(1)
    minus_R1 = (-is_own_R).unsqueeze(1)
    gradient_RU = gradient_RU.put_along_axis_(own_labels_R.unsqueeze(1), minus_R1, axis=1, reduce="add")
    return gradient_RU, losses_R, int((first_R == labels_R).sum())


def _row_sums(values_RU: paddle.Tensor) -> paddle.Tensor:
    """Return row sums [R], added up in blocks: Paddle's sum on the CPU adds sequentially, which is less accurate."""
    width = 256
    missing = -values_RU.shape[1] % width
    blocks = F.pad(values_RU, [0, missing]) if missing else values_RU
    return blocks.reshape([values_RU.shape[0], -1, width]).sum(axis=2).sum(axis=1)
