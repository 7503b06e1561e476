"""Leading singular triplets of a matrix M by randomized SVD, which takes a fraction of the time of a full SVD.

    Q = orth(M G);  repeat Q = orth(M orth(M^T Q));  svd(Q^T M) = U' S V^T,  U = Q U'        G random [n, q]

Algorithms 4.4 and 5.1 of Halko, Martinsson and Tropp 2011 (arXiv:0909.4061). Each iteration costs two products with a
matrix of q columns, and brings the column space of Q closer to the span of the leading left singular vectors.

Shapes: m, n rows and columns of the matrix; k singular triplets; q = 2 k + 8 columns of the random projection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

_NUM_ITERATIONS = 3
_MAX_FULL_SVD = 128  # a full SVD of a matrix with at most this number of rows or columns takes milliseconds


class LeadingSVD(NamedTuple):
    """Leading singular triplets, float32: `u` [m, k], `s` [k] in descending order, `v_t` [k, n]."""

    u: paddle.Tensor
    s: paddle.Tensor
    v_t: paddle.Tensor


def require_triplets(rank: int, shape: Sequence[int], name: str) -> None:
    """Check that the weight of the layer `name` has at least `rank` singular triplets.

    Raises:
        ValueError: the rank is larger than the smaller dimension of the weight.
    """
    if rank > min(shape):
        raise ValueError(
            f"lora_rank={rank} exceeds the number of singular values of {name} ({min(shape)}, for a weight of shape "
            f"{list(shape)}); lower lora_rank, or leave this layer out of lora_target_modules"
        )


def require_finite(matrix: paddle.Tensor, name: str) -> None:
    """Check that all values of a matrix of the layer `name` are finite.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    if not bool(matrix.isfinite().all()):
        raise ValueError(
            f"{name}: the matrix to decompose has NaN or infinite values, so the adapter has no initial factors; use "
            "weights without such values, or leave this layer out of the targets"
        )


@paddle.no_grad()
def leading_svd(matrix: paddle.Tensor, rank: int, name: str, *, exact: bool = False) -> LeadingSVD:
    """Return the `rank` leading singular triplets of `matrix` [m, n].

    The random projection depends only on `name`, so the result is deterministic. In each right singular vector, the
    element with the largest magnitude is positive.

    Args:
        matrix: any floating-point dtype; the randomized SVD is computed in float32, and the full SVD in float64.
        rank: k, at most min(m, n).
        name: seed of the random projection, and name in error messages.
        exact: compute a full SVD of a large matrix too.

    Raises:
        ValueError: a value of the matrix is NaN or infinite.
    """
    require_finite(matrix, name)
    assert rank <= min(matrix.shape), f"{name}: rank {rank} of {matrix.shape}"
    matrix_MN = matrix.astype("float32")
    width = 2 * rank + 8
    if exact or min(matrix_MN.shape) <= max(2 * width, _MAX_FULL_SVD):
        triplets = paddle.linalg.svd(matrix_MN.astype("float64"), full_matrices=False)
        u, s, v_t = (part.astype("float32") for part in triplets)
    else:
        u, s, v_t = _projected_svd(matrix_MN, width, name)
    u_MK, s_K, v_t_KN = u[:, :rank], s[:rank], v_t[:rank]
    largest = paddle.take_along_axis(v_t_KN, v_t_KN.abs().argmax(axis=1, keepdim=True), axis=1)  # [k, 1]
    signs = paddle.where(largest < 0, -paddle.ones_like(largest), paddle.ones_like(largest))
    return LeadingSVD(u_MK * signs.T, s_K, v_t_KN * signs)


def _projected_svd(matrix_MN: paddle.Tensor, width: int, name: str) -> tuple[paddle.Tensor, ...]:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    start = np.random.default_rng(seed).standard_normal((matrix_MN.shape[1], width), dtype=np.float32)
    q_MQ, _ = paddle.linalg.qr(paddle.matmul(matrix_MN, paddle.to_tensor(start)))
    for _ in range(_NUM_ITERATIONS):
        z_NQ, _ = paddle.linalg.qr(paddle.matmul(matrix_MN, q_MQ, transpose_x=True))
        q_MQ, _ = paddle.linalg.qr(paddle.matmul(matrix_MN, z_NQ))
    # M^T Q = Z R, so M is close to Q R^T Z^T. The SVD of R^T [q, q] therefore gives an approximate SVD of M.
    z_NQ, r_QQ = paddle.linalg.qr(paddle.matmul(matrix_MN, q_MQ, transpose_x=True))
    u, s, v_t = paddle.linalg.svd(r_QQ.T)
    return paddle.matmul(q_MQ, u), s, paddle.matmul(v_t, z_NQ, transpose_y=True)
