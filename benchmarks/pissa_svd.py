"""Time of PiSSA's initialization, and its error relative to the exact SVD.

    python -m benchmarks.pissa_svd [--shape 4096 11008] [--rank 16] [--no_exact]

Decomposes two random normal matrices. The singular values of the first matrix are close to each other, which is the
hardest case. The singular values of the second matrix decrease as 1 / sqrt(i), as in a trained weight. Prints the
seconds, and the increase of the residual's Frobenius norm over the residual of the exact SVD.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext.peft.leading_svd import leading_svd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 11008])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--no_exact", action="store_true", help="skip the comparison with the exact SVD, which takes minutes"
    )
    arguments = parser.parse_args()
    for kind, matrix in matrices(*arguments.shape):
        started = time.perf_counter()
        u, s, v_t = leading_svd(matrix, arguments.rank, "benchmark")
        float(s.sum())
        line = f"{kind} {arguments.shape}, rank {arguments.rank}: {time.perf_counter() - started:.2f} s"
        if not arguments.no_exact:
            started = time.perf_counter()
            exact = exact_singular_values(matrix)
            seconds = time.perf_counter() - started
            residual = matrix - paddle.matmul(u * s, v_t)
            excess = float((residual.square().sum() / exact[arguments.rank :].square().sum()).sqrt()) - 1
            line += f" (all singular values: {seconds:.1f} s); residual above the exact SVD's by {excess:.4%}"
        print(line, flush=True)


def matrices(rows: int, columns: int) -> list[tuple[str, paddle.Tensor]]:
    """Return the matrices of the given shape by name."""
    paddle.seed(0)
    normal = paddle.randn([rows, columns]) * 0.02
    falling = normal * paddle.arange(1, columns + 1, dtype="float32").pow(-0.5)
    return [("normal", normal), ("falling", falling)]


def exact_singular_values(matrix: paddle.Tensor) -> paddle.Tensor:
    """Return all singular values in descending order, from the eigenvalues of the smaller Gram matrix."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    squares = np.linalg.eigvalsh(paddle.matmul(wide, wide, transpose_y=True).numpy())
    return paddle.to_tensor(np.sqrt(squares.clip(min=0))[::-1].copy())


if __name__ == "__main__":
    main()
