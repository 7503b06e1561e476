"""Cross entropy of rows of logits; the gradient overwrites the logits.

Shapes: R rows, V vocabulary size.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.linear_cross_entropy.cpp import cross_entropy_cpp
from paddlenlp_ext.ops.linear_cross_entropy.reference import cross_entropy_reference

cross_entropy_op = DispatchedOp("cross_entropy", cpp=(cross_entropy_cpp, usable), reference=cross_entropy_reference)


def cross_entropy_(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool, softcap: float | None = None
) -> tuple[paddle.Tensor, int]:
    """Return the loss of each row, `logsumexp(logits) - logits[target]`, and the number of correct predictions.

    Args:
        logits_RV: fp32; overwritten with their gradient (softmax, minus one at the target) if requested.
        targets_R: int64, from 0 to V - 1.
        with_gradient: whether to compute the gradient; if not, `logits_RV` has unspecified values afterwards.
        softcap: bound of the logits, applied as `softcap * tanh(logits / softcap)`; None: no bound.

    Returns:
        The losses, fp32 [R], and the number of rows whose argmax is the target.

    Raises:
        ValueError: a target is outside the vocabulary (raised by the C++ backend; Paddle's ops raise other errors).
    """
    return cross_entropy_op.choose(logits_RV)(logits_RV, targets_R, with_gradient, softcap)
