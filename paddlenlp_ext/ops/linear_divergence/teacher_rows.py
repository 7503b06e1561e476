"""Distributions of a teacher at the target positions of a batch: from its logits, or from its most likely tokens.

If only the K most likely tokens of the teacher are known, the divergence is computed over K + 1 entries: these tokens,
and the set of all other tokens (the tail). The probability of the student's tail is computed from the full softmax of
the student. The gradient treats the teacher's tail as distributed like the student's tail, so that it is 0 if student
and teacher agree on the K tokens. Scaling the K probabilities to the sum 1 would move the probability of the tail to
the K tokens instead.

Shapes: N target positions of the batch, R rows of a chunk, V vocabulary size, K known tokens of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import paddle

from paddlenlp_ext.ops.linear_cross_entropy.reference import row_sums
from paddlenlp_ext.ops.linear_divergence.divergences import divergence, log_softmax_

SMALLEST_TAIL = 2.0**-24
"""Minimum probability of a tail, below the rounding errors of a sum of float32 probabilities."""


class TeacherRows(Protocol):
    """Distributions of the teacher at the target positions of a batch."""

    def compare(
        self, student_logps_RV: paddle.Tensor, rows_R: paddle.Tensor, beta: float, temperature: float
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the divergence of each row [R], and its gradient with respect to the student's logits [R, V].

        Args:
            student_logps_RV: log-softmax of the student's logits divided by the temperature, fp32. The gradient is with
                respect to these divided logits.
            rows_R: indices of the rows among the target positions of the batch.
            beta: see `divergence`.
            temperature: divisor of the logits.
        """
        ...


class LogitRows:
    """Teacher with logits over the full vocabulary, computed from hidden states chunk by chunk.

    If the vocabularies of student and teacher have different padding, the divergence is computed over the tokens of
    both.

    Args:
        hidden_ND: hidden states of the teacher at the target positions.
        logits: function that maps hidden states [R, D] to logits [R, V].
    """

    def __init__(self, hidden_ND: paddle.Tensor, logits: Callable[[paddle.Tensor], paddle.Tensor]) -> None:
        self._hidden_ND, self._logits = hidden_ND, logits

    def compare(
        self, student_logps_RV: paddle.Tensor, rows_R: paddle.Tensor, beta: float, temperature: float
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return divergences and gradient (`TeacherRows`)."""
        size = student_logps_RV.shape[1]
        logits_RV = self._logits(paddle.gather(self._hidden_ND, rows_R))[:, :size].astype("float32")
        teacher_logps_RV = log_softmax_(logits_RV / temperature)
        divergences_R, weighted_RV = divergence(student_logps_RV, teacher_logps_RV, beta)
        return divergences_R, weighted_RV.subtract_(student_logps_RV.exp().multiply_(row_sums(weighted_RV)))


class TopRows:
    """Teacher with known log-probabilities of the K most likely tokens of each position.

    The log-probabilities must have been computed with the temperature of the loss.

    Args:
        ids_NK: token ids, int64.
        logps_NK: log-probabilities, fp32.
    """

    def __init__(self, ids_NK: paddle.Tensor, logps_NK: paddle.Tensor) -> None:
        self._ids_NK, self._logps_NK = ids_NK, logps_NK

    def compare(
        self, student_logps_RV: paddle.Tensor, rows_R: paddle.Tensor, beta: float, temperature: float
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return divergences and gradient (`TeacherRows`); the log-probabilities already contain the temperature."""
        ids_RK, teacher_RK = paddle.gather(self._ids_NK, rows_R), paddle.gather(self._logps_NK, rows_R)
        student_RK = paddle.take_along_axis(student_logps_RV, ids_RK, axis=1)
        tail_RV = student_logps_RV.exp()
        tail_RV.put_along_axis_(ids_RK, paddle.zeros_like(student_RK), axis=1)
        tail_R1 = paddle.clip(row_sums(tail_RV), min=SMALLEST_TAIL)
        teacher_tail_R1 = paddle.clip(1 - teacher_RK.exp().sum(axis=1, keepdim=True), min=SMALLEST_TAIL)
        student_RC = paddle.concat([student_RK, tail_R1.log()], axis=1)
        teacher_RC = log_softmax_(paddle.concat([teacher_RK, teacher_tail_R1.log()], axis=1))
        divergences_R, weighted_RC = divergence(student_RC, teacher_RC, beta)
        total_R1 = weighted_RC.sum(axis=1, keepdim=True)
        gradient_RV = tail_RV.multiply_(weighted_RC[:, -1:] / tail_R1 - total_R1)
        gradient_RK = weighted_RC[:, :-1] - student_RK.exp() * total_R1
        gradient_RV.put_along_axis_(ids_RK, gradient_RK, axis=1)
        return divergences_R, gradient_RV
