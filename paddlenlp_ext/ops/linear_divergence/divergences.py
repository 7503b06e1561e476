"""Divergences between the token distributions of a student p and a teacher q (GKD, arXiv:2306.13649).

    beta = 0        forward KL:   sum q (log q - log p)
    beta = 1        reverse KL:   sum p (log p - log q)
    0 < beta < 1    generalized Jensen-Shannon divergence, with the mixture m = (1 - beta) p + beta q:
                    beta sum q (log q - log m) + (1 - beta) sum p (log p - log m)

The gradient of a divergence with respect to the logits of p is g - p sum g. For the three cases, g is

    -q              p (log p - log q)              (1 - beta) p (log p - log m)

The entries of a row may be tokens, or tokens and the set of all other tokens (teacher_rows.py).

Shapes: R rows, C entries of a row.
"""

from __future__ import annotations

import math

import paddle

from paddlenlp_ext.ops.linear_cross_entropy.reference import row_sums


def divergence(
    student_logps_RC: paddle.Tensor, teacher_logps_RC: paddle.Tensor, beta: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the divergence of each row, fp32 [R], and g of its gradient, fp32 [R, C].

    Args:
        student_logps_RC: log-probabilities of the student, fp32.
        teacher_logps_RC: log-probabilities of the teacher, fp32.
        beta: from 0 (forward KL) to 1 (reverse KL).
    """
    if beta == 0:
        teacher_RC = teacher_logps_RC.exp()
        return row_sums(teacher_RC * (teacher_logps_RC - student_logps_RC)).squeeze(1), -teacher_RC
    if beta == 1:
        weighted_RC = student_logps_RC.exp() * (student_logps_RC - teacher_logps_RC)
        return row_sums(weighted_RC).squeeze(1), weighted_RC
    mixture_RC = paddle.logaddexp(student_logps_RC + math.log1p(-beta), teacher_logps_RC + math.log(beta))
    of_teacher_RC = (beta * teacher_logps_RC.exp()).multiply_(teacher_logps_RC - mixture_RC)
    weighted_RC = ((1 - beta) * student_logps_RC.exp()).multiply_(student_logps_RC - mixture_RC)
    return row_sums(of_teacher_RC.add_(weighted_RC)).squeeze(1), weighted_RC


def log_softmax_(logits_RV: paddle.Tensor) -> paddle.Tensor:
    """Overwrite fp32 logits with their log-softmax, and return the tensor.

    On the CPU, the sums are more accurate than the sums of paddle.nn.functional.log_softmax (`row_sums`).
    """
    logits_RV.subtract_(logits_RV.max(axis=1, keepdim=True))
    return logits_RV.subtract_(row_sums(logits_RV.exp()).log_())
