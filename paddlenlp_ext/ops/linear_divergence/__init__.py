"""Fused lm_head and divergence from a teacher over chunks of positions.

    loss = sum over target positions of divergence + sft_weight * cross entropy

The logits of student and teacher are computed only for target positions (label != -100), one chunk at a time, as in
ops/linear_cross_entropy. The gradient is computed in the forward pass, while the logits of the chunk are in memory.

Shapes: T positions, R target positions of a chunk, D hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import paddle

from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy_op
from paddlenlp_ext.ops.linear_cross_entropy.chunks import Updates, sum_of_losses
from paddlenlp_ext.ops.linear_divergence.divergences import log_softmax_
from paddlenlp_ext.ops.linear_divergence.teacher_rows import LogitRows as LogitRows
from paddlenlp_ext.ops.linear_divergence.teacher_rows import TeacherRows
from paddlenlp_ext.ops.linear_divergence.teacher_rows import TopRows as TopRows

ROWS_PER_CHUNK = 128
"""Number of target positions whose logits are in memory at the same time."""


@dataclass(frozen=True)
class DivergenceOptions:
    """Options of the loss.

    Attributes:
        beta: from 0 (forward KL) to 1 (reverse KL); between: generalized Jensen-Shannon divergence.
        temperature: divisor of the logits of student and teacher in the divergence.
        sft_weight: weight of the cross entropy of the labels, at temperature 1.
        vocab_size: number of tokens that student and teacher have in common; None: all tokens of the student.
    """

    beta: float = 0.5
    temperature: float = 1.0
    sft_weight: float = 0.0
    vocab_size: int | None = None


@dataclass
class LossParts:
    """Sums over the target positions: divergence, cross entropy, and correct predictions of the student."""

    divergence: float = 0.0
    cross_entropy: float = 0.0
    num_correct: int = 0


def linear_divergence(
    hidden_TD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_T: paddle.Tensor,
    teacher: TeacherRows,
    options: DivergenceOptions,
    chunk: int = ROWS_PER_CHUNK,
    implementation: str | None = None,
    softcap: float | None = None,
    updates: Updates = (),
) -> tuple[paddle.Tensor, LossParts]:
    """Return the loss summed over the target positions, an fp32 scalar, and its parts.

    Args:
        hidden_TD: hidden states of the student, [T, D].
        weight_VD: lm_head of the student, [V, D]; a frozen weight gets no gradient.
        labels_T: [T]; -100 marks positions without a target.
        teacher: distributions of the teacher at the target positions.
        options: options of the loss.
        chunk: target positions per chunk. Several tensors [chunk, V] are in memory at the same time.
        implementation, softcap, updates: see `linear_cross_entropy`. The backend computes the matmuls of the student's
            lm_head; the divergence is computed in plain Paddle.
    """
    losses, parts = linear_cross_entropy_op.choose(hidden_TD, implementation), LossParts()

    def by_chunks(
        hidden_RD: paddle.Tensor,
        weight_VD: paddle.Tensor,
        labels_R: paddle.Tensor,
        chunk: int | None,
        is_summed: bool,
        updates: Updates,
    ) -> tuple[paddle.Tensor, int]:
        rows_R = paddle.arange(labels_R.shape[0])
        row_losses = _RowLosses(labels_R, teacher, options, parts)
        return losses(hidden_RD, weight_VD, rows_R, chunk, is_summed, updates, softcap, row_losses=row_losses)

    loss, parts.num_correct = sum_of_losses(by_chunks, hidden_TD, weight_VD, labels_T, chunk, updates)
    return loss, parts


@dataclass
class _RowLosses:
    """Losses of a chunk and the gradient of its logits, with the interface of `chunks.RowLosses`.

    Attributes:
        labels: labels of all target positions.
        teacher: distributions of the teacher.
        options: options of the loss.
        parts: sums to which the parts of the loss are added.
    """

    labels: paddle.Tensor
    teacher: TeacherRows
    options: DivergenceOptions
    parts: LossParts = field(default_factory=LossParts)

    def __call__(self, logits_RV: paddle.Tensor, rows_R: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor, int]:
        """Return the losses [R], the gradient of the logits [R, V], and the number of correct predictions.

        Args:
            logits_RV: logits of the student, fp32, after the soft cap; overwritten.
            rows_R: indices of the rows among the target positions.
        """
        options, targets_R1 = self.options, paddle.gather(self.labels, rows_R).unsqueeze(1)
        num_columns, size = logits_RV.shape[1], options.vocab_size or logits_RV.shape[1]
        num_correct = int((logits_RV.argmax(axis=1) == targets_R1.squeeze(1)).sum())
        tempered_RV = logits_RV[:, :size] / options.temperature
        logps_RV = log_softmax_(logits_RV)
        cross_entropies_R = -paddle.take_along_axis(logps_RV, targets_R1, axis=1).squeeze(1)
        divergences_R, gradient_RV = self.teacher.compare(
            log_softmax_(tempered_RV), rows_R, options.beta, options.temperature
        )
        gradient_RV.scale_(1 / options.temperature)
        if size < num_columns:
            padding_RV = paddle.zeros([gradient_RV.shape[0], num_columns - size], "float32")
            gradient_RV = paddle.concat([gradient_RV, padding_RV], axis=1)
        if options.sft_weight:
            minus_one_R1 = paddle.full(targets_R1.shape, -1.0, "float32")
            of_labels_RV = logps_RV.exp_().put_along_axis_(targets_R1, minus_one_R1, axis=1, reduce="add")
            gradient_RV.add_(of_labels_RV.scale_(options.sft_weight))
        self.parts.divergence += float(divergences_R.astype("float64").sum())
        self.parts.cross_entropy += float(cross_entropies_R.astype("float64").sum())
        return divergences_R + options.sft_weight * cross_entropies_R, gradient_RV, num_correct
