"""Causal depthwise convolution: values and gradients against NumPy, documents, branches, windows before them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.causal_convolution import causal_convolution_op, document_taps
from tests.common.marks import backends_of
from tests.ops.causal_convolution.formula import formula

CHANNELS = 5
each_backend = pytest.mark.parametrize("backend", backends_of(causal_convolution_op))


def convolved(x_TD: np.ndarray, weight_DL: np.ndarray) -> np.ndarray:
    """Return the convolution of one sequence."""
    taps = weight_DL.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x_TD.shape[1])), x_TD])
    return np.stack([(padded[t : t + taps] * weight_DL.T).sum(0) for t in range(len(x_TD))])


def run(
    backend: str, x: np.ndarray, weight_DL: np.ndarray, layout: AttentionLayout, has_windows: bool = False
) -> np.ndarray:
    """Return the result of a backend."""
    tensors = paddle.to_tensor(x), paddle.to_tensor(weight_DL)
    taps = document_taps(layout, weight_DL.shape[1], has_windows)
    return causal_convolution_op.choose(tensors[0], backend)(*tensors, taps).numpy()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def gradient(tensor: Any) -> np.ndarray:
    """Return the gradient of a tensor."""
    return tensor.grad.numpy()


@each_backend
@pytest.mark.parametrize("num_taps", [1, 3, 7])
def test_causal_convolution_of_documents_equals_the_documents_alone(backend, num_taps):
    lengths, weight = [4, 1, 9, 2], numbers(CHANNELS, num_taps, seed=1)
    layout = AttentionLayout.from_documents([lengths, [9, 7]])
    x = numbers(32, CHANNELS)
    y = run(backend, x, weight, layout)
    ends = np.cumsum([*lengths, 9, 7])
    expected = np.concatenate([convolved(part, weight) for part in np.split(x, ends[:-1])])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_causal_convolution_of_branches_continues_the_parent(backend):
    layout = AttentionLayout.from_documents([[3, 2, 4]], document_parents=[[None, 0, 0]])
    x, weight = numbers(9, CHANNELS), numbers(CHANNELS, 3, seed=1)
    y = run(backend, x, weight, layout)
    np.testing.assert_allclose(y[:5], convolved(x[:5], weight), rtol=1e-5, atol=1e-6)
    second = convolved(np.concatenate([x[:3], x[5:]]), weight)[3:]
    np.testing.assert_allclose(y[5:], second, rtol=1e-5, atol=1e-6)


@each_backend
@pytest.mark.parametrize("num_taps", [1, 3, 4])
def test_causal_convolution_with_windows_reads_the_window_of_its_row(backend, num_taps):
    """Test two rows of two documents; the last document continues a parent."""
    layout = AttentionLayout.from_documents([[1, 4], [2, 3]], document_parents=[[None, None], [None, 0]])
    weight, x, window = numbers(CHANNELS, num_taps, seed=1), numbers(10, CHANNELS), num_taps - 1
    before = numbers(2, window, CHANNELS, seed=3)
    y = run(backend, np.concatenate([x, before.reshape(-1, CHANNELS)]), weight, layout, has_windows=True)
    for row, part in ((0, slice(0, 1)), (0, slice(1, 5)), (1, slice(5, 10))):
        expected = convolved(np.concatenate([before[row], x[part]]), weight)[window:]
        np.testing.assert_allclose(y[part], expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_causal_convolution_does_not_read_nan_of_other_documents(backend):
    layout = AttentionLayout.from_documents([[3, 4]])
    x = numbers(7, CHANNELS)
    x[2] = np.nan
    y = run(backend, x, numbers(CHANNELS, 3, seed=1), layout)
    assert np.isfinite(y[3:]).all() and np.isnan(y[2]).all()


LAYOUTS = {
    "documents": AttentionLayout.from_documents([[4, 1, 9, 2], [8, 8]]),
    "branches": AttentionLayout.from_documents(
        [[5, 1, 2, 4], [1, 6, 2, 3]], document_parents=[[None, 0, 0, None], [None, None, 1, 1]]
    ),
    "several parts": AttentionLayout.from_documents([[300, 1, 2, 97]]),
}


@each_backend
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("num_taps", "channels"), [(1, 5), (3, 16), (4, 530)])
@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_causal_convolution_has_the_gradients_of_the_formula(
    backend, layout, num_taps, channels, has_windows, has_bias
):
    taps = document_taps(layout, num_taps, has_windows)
    count, windows = len(taps.rows), has_windows * len(layout.document_lengths) * (num_taps - 1)
    x, weight, bias = numbers(count + windows, channels), numbers(channels, num_taps, seed=1), numbers(channels, seed=2)
    d = numbers(count, channels, seed=3)
    tensors = [paddle.to_tensor(each, stop_gradient=False) for each in (x, weight, bias)]
    op = causal_convolution_op.choose(tensors[0], backend)
    y = op(*tensors[:2], taps, tensors[2] if has_bias else None)
    paddle.autograd.backward([y], [paddle.to_tensor(d)])
    expected, dx, dw, db = formula(x, weight, has_bias * bias, taps.rows, d)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient(tensors[0]), dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient(tensors[1]), dw, rtol=1e-5, atol=1e-4)
    if has_bias:
        np.testing.assert_allclose(gradient(tensors[2]), db, rtol=1e-5, atol=1e-4)


@each_backend
@pytest.mark.parametrize("trained", range(3))
def test_causal_convolution_with_a_gradient_of_one_input_equals_the_full_gradient(backend, trained):
    layout, gradients = LAYOUTS["branches"], []
    x, weight, bias, d = numbers(24, 20), numbers(20, 4, seed=1), numbers(20, seed=2), numbers(24, 20, seed=3)
    for names in (range(3), [trained]):
        tensors = [paddle.to_tensor(each, stop_gradient=i not in names) for i, each in enumerate((x, weight, bias))]
        op = causal_convolution_op.choose(tensors[0], backend)
        y = op(*tensors[:2], document_taps(layout, 4), tensors[2])
        paddle.autograd.backward([y], [paddle.to_tensor(d)])
        gradients.append(gradient(tensors[trained]))
    np.testing.assert_array_equal(*gradients)


@each_backend
def test_causal_convolution_of_packed_documents_has_the_bits_of_the_documents_alone(backend):
    """Test outputs and gradients of a document and its branch between neighbors whose gradients are NaN."""
    packed = AttentionLayout.from_documents([[3, 1, 9, 2, 5]], document_parents=[[None, None, None, 2, None]])
    alone = AttentionLayout.from_documents([[9, 2]], document_parents=[[None, 0]])
    x, weight, d = numbers(20, CHANNELS), numbers(CHANNELS, 4, seed=1), numbers(20, CHANNELS, seed=2)
    d[:4] = d[15:] = np.nan
    found = []
    for layout, part in ((packed, slice(0, 20)), (alone, slice(4, 15))):
        x_tensor = paddle.to_tensor(x[part], stop_gradient=False)
        op = causal_convolution_op.choose(x_tensor, backend)
        y = op(x_tensor, paddle.to_tensor(weight), document_taps(layout, 4))
        paddle.autograd.backward([y], [paddle.to_tensor(d[part])])
        found.append((y.numpy(), gradient(x_tensor)))
    for of_packed, of_alone in zip(*found, strict=True):
        np.testing.assert_array_equal(of_packed[4:15], of_alone)
