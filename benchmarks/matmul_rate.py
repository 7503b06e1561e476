"""Matrix multiplication rate of the machine: oneDNN's products on the shapes of a training step."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import paddle

from paddlenlp_ext._runtime import threads_per_process

_LIBRARIES = Path(paddle.__file__).parent / "libs"
_FUNCTIONS = {"float32": "dnnl_sgemm", "bfloat16": "dnnl_gemm_bf16bf16f32"}
_SUCCESS = 0


def onednn_rates(dtype: str, tokens: int, shapes: Iterable[tuple[int, int]], repeats: int = 10) -> dict[str, float]:
    """Return GFLOP/s of [tokens, in] x [in, out] for each (in, out), the fastest of `repeats` calls, summed in fp32.

    Raises:
        ValueError: oneDNN does not support the product on this processor.
    """
    ctypes.CDLL(str(_LIBRARIES / "libiomp5.so")).omp_set_num_threads(threads_per_process())
    call = getattr(ctypes.CDLL(str(_LIBRARIES / "libdnnl.so.3")), _FUNCTIONS[dtype])
    rates = {}
    for inner, columns in sorted(set(shapes)):
        left, right = _operand((tokens, inner), dtype), _operand((inner, columns), dtype)
        out = np.empty((tokens, columns), np.float32)
        arguments = _gemm_arguments(left, right, out)
        fastest = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            status = call(*arguments)
            fastest = min(fastest, time.perf_counter() - start)
            if status != _SUCCESS:
                raise ValueError(f"oneDNN has no product of {dtype} on this processor (status {status})")
        rates[f"{tokens} x {inner} x {columns}"] = round(2.0 * tokens * inner * columns / fastest / 1e9, 1)
    return rates


def _operand(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Return random numbers; bfloat16 values are the upper half of the bits of float32."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return values if dtype == "float32" else np.ascontiguousarray(values.view(np.uint16)[:, 1::2])


def _gemm_arguments(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> list[object]:
    """Return the arguments of C = A B for row-major matrices: no transposition, factors 1 and 0."""
    (rows, inner), columns = left.shape, right.shape[1]
    no, size, number = ctypes.c_char(b"N"), ctypes.c_int64, ctypes.c_float
    pointers = [ctypes.c_void_p(matrix.ctypes.data) for matrix in (left, right, out)]
    sizes = [size(rows), size(columns), size(inner)]
    a, b, c = pointers
    return [no, no, *sizes, number(1), a, size(inner), b, size(columns), number(0), c, size(columns)]
