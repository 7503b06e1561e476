"""Comparison of results whose bits depend on the processor."""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.ops.cpp import bf16


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Assert equal bits, or equality within rounding on processors without AVX-512.

    There, the bits of a row of oneDNN's products depend on the number of rows and of threads.
    """
    if bf16.conversion_reason() is None:
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
