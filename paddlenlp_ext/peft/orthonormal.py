"""A matrix whose columns stay orthonormal while it trains.

    R = H(frame) (-H(reflectors))[:, :r]        H(A) = H_1 ... H_r,  H_i = I - 2 v_i v_i^T / (v_i^T v_i)
    v_i = e_i + column i of A below its diagonal

A product of reflections is orthogonal whatever their vectors are, so that no step of an optimizer can leave the
constraint. `frame` is frozen and says where R starts; `reflectors` trains and starts at zero, where H(0)[:, :r] is -E.
These are the coordinates of `torch.nn.utils.parametrizations.orthogonal` for a tall matrix (Householder map, dynamic
trivialization: Lezcano-Casado 2019, arXiv 1909.09501), whose frame is a full D x D matrix; here it is a product of r
reflections too, D x r numbers.

The product is applied at once: H = I - V T V^T, T^-1 = strict upper triangle of V^T V + half its diagonal (Puglisi
1992; Joffrain et al. 2006).

Shapes: D rows, r columns, r <= D.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn


class OrthonormalColumns(nn.Layer):
    """R [D, r], float32, with R^T R = I for every value of its parameter.

    Args:
        start: [D, r], orthonormal columns; R begins there.
    """

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        shape = list(start.shape)
        assert shape[0] >= shape[1], f"{shape[1]} columns of length {shape[0]} can't be orthonormal"
        zeros = nn.initializer.Constant(0.0)
        self.reflectors = self.create_parameter(shape, dtype="float32", default_initializer=zeros)
        self.register_buffer("frame", paddle.to_tensor(reflectors_of(start)))

    def matrix(self) -> paddle.Tensor:
        """R [D, r]."""
        unit = paddle.eye(*self.reflectors.shape)
        return reflect(self.frame, -reflect(self.reflectors, unit))


def reflect(reflectors_Dr: paddle.Tensor, x_Dk: paddle.Tensor) -> paddle.Tensor:
    """H(reflectors) x, [D, k]; what stands on and above the diagonal of the reflectors is not read."""
    num_rows, rank = reflectors_Dr.shape
    v_Dr = paddle.tril(reflectors_Dr, -1) + paddle.eye(num_rows, rank)
    products_rr = paddle.matmul(v_Dr, v_Dr, transpose_x=True)
    inverse_t_rr = paddle.triu(products_rr) - 0.5 * paddle.diag(paddle.diagonal(products_rr))
    inner_rk = paddle.linalg.triangular_solve(inverse_t_rr, paddle.matmul(v_Dr, x_Dk, transpose_x=True), upper=True)
    return x_Dk - paddle.matmul(v_Dr, inner_rk)


def random_orthonormal(values: np.ndarray) -> np.ndarray:
    """Orthonormal columns that span what random `values` [D, r] span, with signs that suit `reflectors_of`."""
    rest = np.linalg.qr(values.astype(np.float64))[0]
    start = rest.copy()
    for index in range(values.shape[1]):
        if rest[index, index] > 0:
            start[:, index] *= -1
            rest[:, index] *= -1
        _reflect_away(rest, index)
    return start


def reflectors_of(orthonormal: np.ndarray) -> np.ndarray:
    """Reflectors with H(reflectors)[:, :r] = `orthonormal`, float32 [D, r], zero on and above the diagonal.

    Exact where the matrix comes from `random_orthonormal`; a column that is a unit vector already has no reflection.
    """
    rest = orthonormal.astype(np.float64)
    vectors = [_reflect_away(rest, index) for index in range(rest.shape[1])]
    return np.tril(np.stack(vectors, axis=1), -1).astype(np.float32)


def _reflect_away(rest: np.ndarray, index: int) -> np.ndarray:
    """Turn column `index` into its unit vector, in place and the columns behind it along; returns v, with v_i = 1."""
    vector = -rest[:, index]
    vector[:index] = 0.0
    vector[index] += 1.0
    vector /= vector[index]
    rest -= 2.0 / (vector @ vector) * np.outer(vector, vector @ rest)
    return vector
