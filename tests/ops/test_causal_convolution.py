"""Causal depthwise convolution: values and gradients against NumPy, documents, branches, windows before them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.causal_convolution import causal_convolution, document_taps

CHANNELS = 5


def convolved(x_TD: np.ndarray, weight_DL: np.ndarray) -> np.ndarray:
    """Return the convolution of one sequence."""
    taps = weight_DL.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x_TD.shape[1])), x_TD])
    return np.stack([(padded[t : t + taps] * weight_DL.T).sum(0) for t in range(len(x_TD))])


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


@pytest.mark.parametrize("num_taps", [1, 3, 7])
def test_causal_convolution_of_documents_equals_the_documents_alone(num_taps):
    lengths, weight = [4, 1, 9, 2], numbers(CHANNELS, num_taps, seed=1)
    layout = AttentionLayout.from_documents([lengths, [9, 7]])
    x = numbers(32, CHANNELS)
    y = causal_convolution(paddle.to_tensor(x), paddle.to_tensor(weight), document_taps(layout, num_taps)).numpy()
    ends = np.cumsum([*lengths, 9, 7])
    expected = np.concatenate([convolved(part, weight) for part in np.split(x, ends[:-1])])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_causal_convolution_has_the_gradients_of_the_formula():
    """Test dx[t] = sum of w[l] d[t + L - 1 - l] and dw[l] = sum of d[t] x[t - (L - 1 - l)] within each document."""
    lengths, taps = [4, 1, 9], 3
    layout = AttentionLayout.from_documents([lengths])
    x, weight, d = numbers(14, CHANNELS), numbers(CHANNELS, taps, seed=1), numbers(14, CHANNELS, seed=2)
    x_tensor, weight_tensor = (paddle.to_tensor(each, stop_gradient=False) for each in (x, weight))
    y = causal_convolution(x_tensor, weight_tensor, document_taps(layout, taps))
    (y * paddle.to_tensor(d)).sum().backward()
    dx, dw, start = np.zeros_like(x), np.zeros_like(weight), 0
    for length in lengths:
        for t in range(length):
            for tap in range(taps):
                source = t - (taps - 1 - tap)
                if source >= 0:
                    dx[start + source] += weight[:, tap] * d[start + t]
                    dw[:, tap] += d[start + t] * x[start + source]
        start += length
    np.testing.assert_allclose(x_tensor.grad.numpy(), dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight_tensor.grad.numpy(), dw, rtol=1e-5, atol=1e-6)


def test_causal_convolution_of_branches_continues_the_parent():
    layout = AttentionLayout.from_documents([[3, 2, 4]], document_parents=[[None, 0, 0]])
    x, weight = numbers(9, CHANNELS), numbers(CHANNELS, 3, seed=1)
    y = causal_convolution(paddle.to_tensor(x), paddle.to_tensor(weight), document_taps(layout, 3)).numpy()
    np.testing.assert_allclose(y[:5], convolved(x[:5], weight), rtol=1e-5, atol=1e-6)
    second = convolved(np.concatenate([x[:3], x[5:]]), weight)[3:]
    np.testing.assert_allclose(y[5:], second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_taps", [1, 3, 4])
def test_causal_convolution_with_windows_reads_the_window_of_its_row(num_taps):
    """Test two rows of two documents; the last document continues a parent."""
    layout = AttentionLayout.from_documents([[1, 4], [2, 3]], document_parents=[[None, None], [None, 0]])
    weight, x, window = numbers(CHANNELS, num_taps, seed=1), numbers(10, CHANNELS), num_taps - 1
    before = numbers(2, window, CHANNELS, seed=3)
    rows = paddle.to_tensor(np.concatenate([x, before.reshape(-1, CHANNELS)]))
    y = causal_convolution(rows, paddle.to_tensor(weight), document_taps(layout, num_taps, has_windows=True)).numpy()
    for row, part in ((0, slice(0, 1)), (0, slice(1, 5)), (1, slice(5, 10))):
        expected = convolved(np.concatenate([before[row], x[part]]), weight)[window:]
        np.testing.assert_allclose(y[part], expected, rtol=1e-5, atol=1e-6)


def test_causal_convolution_does_not_read_nan_of_other_documents():
    layout = AttentionLayout.from_documents([[3, 4]])
    x = numbers(7, CHANNELS)
    x[2] = np.nan
    weight = paddle.to_tensor(numbers(CHANNELS, 3, seed=1))
    y = causal_convolution(paddle.to_tensor(x), weight, document_taps(layout, 3)).numpy()
    assert np.isfinite(y[3:]).all() and np.isnan(y[2]).all()
