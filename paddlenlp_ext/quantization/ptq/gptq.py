"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): round the columns one by one, and correct the remaining columns.

    H = X^T X + damping mean(diag(X^T X)) I         U^T U = H^-1, U upper triangular
    e = (w_i - q_i) / U_ii                          error of column i
    w_j = w_j - e U_ij,   j > i                     correction of the later columns

The corrections minimize |X (W - Q)^T|^2 for the columns rounded so far.

| option | order of the columns | scales of a group of adjacent inputs |
| --- | --- | --- |
| `act_order` | columns with the largest inputs first | fitted to the original weight |
| otherwise | unchanged | fitted to the corrected weight, just before the group's first column is rounded |

Shapes: O outputs, I inputs, K inputs per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle

from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat, IntegerWeight

_COLUMNS = 128
"""Number of columns whose corrections are applied to later columns in one matrix product, as in the paper."""


@dataclass(frozen=True)
class InverseFactor:
    """Order of the columns, and the factor U for this order; layers with the same inputs share one instance.

    Attributes:
        order: input index of each column, int [I].
        upper: U, float32 [I, I].
        is_reordered: whether the columns are sorted by the diagonal of H.
    """

    order: np.ndarray
    upper: np.ndarray
    is_reordered: bool

    @classmethod
    def from_hessian(cls, hessian_II: np.ndarray, act_order: bool = False, damping: float = 0.01) -> InverseFactor:
        """Compute the order of the columns, and the upper Cholesky factor U of H^-1, without computing H^-1.

        Let H' be H with both axes reversed, and L the lower Cholesky factor of H'. U is L^-1 with both axes reversed.

        Args:
            hessian_II: X^T X of the inputs, or a multiple of it.
            act_order: sort the columns by the diagonal of H, descending.
            damping: the mean of the diagonal of H, times `damping`, is added to the diagonal.

        Raises:
            ValueError: H is not positive definite.
        """
        diagonal = hessian_II.diagonal().astype(np.float64)
        order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(diagonal))
        damped_II = hessian_II.astype(np.float64)
        added = np.where(diagonal > 0, damping * diagonal.mean(), 1.0)  # adds 1 for an input that is always 0
        damped_II[np.diag_indices_from(damped_II)] += added
        try:
            lower_II = np.linalg.cholesky(damped_II[np.ix_(order[::-1], order[::-1])])
        except np.linalg.LinAlgError as error:
            raise ValueError(
                "the second moments of the inputs are not positive definite; raise gptq_damping or use more "
                "calibration rows"
            ) from error
        identity = paddle.eye(len(lower_II), dtype="float64")
        inverse = paddle.linalg.triangular_solve(paddle.to_tensor(lower_II), identity, upper=False).numpy()
        return cls(order, np.ascontiguousarray(inverse[::-1, ::-1]).astype(np.float32), act_order)


def gptq(weight_OI: np.ndarray, factor: InverseFactor, integers: IntegerFormat) -> IntegerWeight:
    """Quantize a weight with GPTQ.

    Args:
        weight_OI: the weight, float32.
        factor: column order and U for the layer's inputs.
        integers: format of the result.

    Raises:
        ValueError: the weight does not fit the format (`IntegerFormat`).
    """
    outputs, inputs = weight_OI.shape
    group, order, upper_II = integers.group_of(inputs), factor.order, factor.upper
    w_OI = weight_OI[:, order].astype(np.float32)
    scales, zeros = integers.fit(weight_OI.reshape(outputs, -1, group))
    codes_OI = np.empty((outputs, inputs), np.int8)
    span = inputs if factor.is_reordered else group
    for start in range(0, inputs, span):
        if not factor.is_reordered:
            fitted = integers.fit(w_OI[:, None, start : start + span])
            scales[:, start // group], zeros[:, start // group] = fitted[0][:, 0], fitted[1][:, 0]
        for begin in range(start, start + span, _COLUMNS):
            end = min(begin + _COLUMNS, start + span)
            errors = np.empty((outputs, end - begin), np.float32)
            for column in range(begin, end):
                index = order[column] // group
                value, scale, zero = w_OI[:, column], scales[:, index], zeros[:, index]
                code = integers.codes(value, scale, zero)
                codes_OI[:, order[column]] = code
                error = (value - (code - zero) * scale) / upper_II[column, column]
                w_OI[:, column + 1 : end] -= np.outer(error, upper_II[column, column + 1 : end])
                errors[:, column - begin] = error
            w_OI[:, end:] -= errors @ upper_II[begin:end, end:]
    return IntegerWeight(codes_OI, scales, zeros)
