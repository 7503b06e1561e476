"""Log-probabilities of single tokens against the formula in double precision, with a gradient of its own for each."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.linear_cross_entropy import token_logprobs
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param("cpp", marks=needs_cpp), "reference"]


def make(num_rows: int = 37, hidden_size: int = 8, vocab_size: int = 97):
    generator = np.random.default_rng(num_rows)
    labels = generator.integers(0, vocab_size, num_rows)
    labels[generator.random(num_rows) > 0.6] = -100
    return normal(1, num_rows, hidden_size), normal(2, vocab_size, hidden_size), labels, normal(3, num_rows)


def dense(hidden, weight, labels, gradients, softcap=None):
    """Return the log-probabilities and the gradients of hidden states and weight."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logits, slope = hidden @ weight.T, 1.0
    if softcap is not None:
        ratio = np.tanh(logits / softcap)
        logits, slope = softcap * ratio, 1 - ratio**2
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    rows, is_target = np.arange(len(labels)), labels != -100
    targets = np.where(is_target, labels, 0)
    logprobs = np.log(probabilities[rows, targets]) * is_target
    one_hot = np.eye(len(weight))[targets]
    logits_gradient = (one_hot - probabilities) * (is_target * gradients)[:, None] * slope
    return logprobs, logits_gradient @ weight, logits_gradient.T @ hidden


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("trains", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_token_logprobs_match_the_formula(chunk, trains, backend, softcap):
    hidden, weight, labels, gradients = make()
    tensors = [paddle.to_tensor(x, stop_gradient=not trains[index]) for index, x in enumerate((hidden, weight))]
    logprobs = token_logprobs(*tensors, paddle.to_tensor(labels), chunk, backend, softcap)
    (logprobs * paddle.to_tensor(gradients)).sum().backward()

    expected, *expected_gradients = dense(hidden, weight, labels, gradients, softcap)
    assert logprobs.dtype == paddle.float32
    np.testing.assert_allclose(logprobs.numpy(), expected, rtol=2e-6, atol=2e-6)
    for tensor, gradient, is_trained in zip(tensors, expected_gradients, trains, strict=True):
        assert (tensor.grad is not None) == is_trained
        if is_trained:
            np.testing.assert_allclose(tensor.grad.numpy(), gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_trains", [True, False])
def test_token_logprobs_with_bf16_weight_are_within_rounding(backend, weight_trains):
    hidden, weight, labels, gradients = make(37, 40)
    hidden_t = paddle.to_tensor(hidden, stop_gradient=False)
    weight_t = paddle.to_tensor(weight).astype("bfloat16")
    weight_t.stop_gradient = not weight_trains
    logprobs = token_logprobs(hidden_t, weight_t, paddle.to_tensor(labels), 16, backend)
    (logprobs * paddle.to_tensor(gradients)).sum().backward()
    rounded = weight_t.astype("float32").numpy()
    expected, hidden_gradient, weight_gradient = dense(hidden, rounded, labels, gradients)
    pairs = [(logprobs, expected), (hidden_t.grad, hidden_gradient)]
    if weight_trains:
        assert weight_t.grad.dtype == paddle.bfloat16
        pairs.append((weight_t.grad.astype("float32"), weight_gradient))
    for actual, exact in pairs:
        assert np.linalg.norm(actual.numpy() - exact) <= 0.02 * np.linalg.norm(exact)


def test_token_logprobs_without_targets_are_zero_with_zero_gradients():
    tensors = [paddle.to_tensor(x, stop_gradient=False) for x in make(4, 3, 5)[:2]]
    logprobs = token_logprobs(*tensors, paddle.full([4], -100, "int64"))
    logprobs.sum().backward()
    np.testing.assert_array_equal(logprobs.numpy(), np.zeros(4, np.float32))
    for tensor in tensors:
        np.testing.assert_array_equal(tensor.grad.numpy(), np.zeros(tensor.shape, np.float32))
