"""Linear layer fused with cross entropy, against the formula in double precision; precision and memory."""

from __future__ import annotations

import ctypes

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.ops.linear_cross_entropy.reference import linear_cross_entropy_reference
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param("cpp", marks=needs_cpp), "reference"]


def dense(hidden, weight, labels):
    """Return the loss sum, the number of correct predictions and both gradients in double precision."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    is_target = labels != -100
    logits = hidden @ weight.T
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    rows, targets = np.arange(len(labels)), np.where(is_target, labels, 0)
    losses = -np.log(probabilities[rows, targets])
    probabilities[rows, targets] -= 1
    logits_gradient = probabilities * is_target[:, None]
    is_correct = (logits.argmax(1) == labels) & is_target
    return losses[is_target].sum(), is_correct.sum(), logits_gradient @ weight, logits_gradient.T @ hidden


def make(num_rows: int, hidden_size: int, vocab_size: int, target_fraction: float):
    generator = np.random.default_rng(num_rows)
    labels = generator.integers(0, vocab_size, num_rows)
    labels[generator.random(num_rows) > target_fraction] = -100
    return normal(1, num_rows, hidden_size), normal(2, vocab_size, hidden_size), labels


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("sizes", [(1, 3, 2, 1.0), (37, 8, 97, 0.6), (16, 5, 64, 1.0)])
@pytest.mark.parametrize("weight_trains", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_cross_entropy_matches_the_formula(chunk, sizes, weight_trains, backend):
    hidden, weight, labels = make(*sizes)
    hidden_t = paddle.to_tensor(hidden, stop_gradient=False)
    weight_t = paddle.to_tensor(weight, stop_gradient=not weight_trains)
    loss, num_correct = linear_cross_entropy(hidden_t, weight_t, paddle.to_tensor(labels), chunk, backend)
    (loss * 0.25).backward()

    expected_loss, expected_num_correct, hidden_gradient, weight_gradient = dense(hidden, weight, labels)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
    assert num_correct == expected_num_correct
    np.testing.assert_allclose(hidden_t.grad.numpy(), 0.25 * hidden_gradient, rtol=0, atol=1e-5)
    assert (weight_t.grad is not None) == weight_trains
    if weight_trains:
        np.testing.assert_allclose(weight_t.grad.numpy(), 0.25 * weight_gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_cross_entropy_reads_strided_trainable_weight(backend):
    hidden, weight, labels = make(37, 8, 97, 0.6)
    lying_DV = paddle.to_tensor(np.ascontiguousarray(weight.T), stop_gradient=False)
    loss, _ = linear_cross_entropy(
        paddle.to_tensor(hidden), lying_DV.transpose([1, 0]), paddle.to_tensor(labels), implementation=backend
    )
    loss.backward()
    expected_loss, _, _, weight_gradient = dense(hidden, weight, labels)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
    np.testing.assert_allclose(lying_DV.grad.numpy(), weight_gradient.T, rtol=0, atol=1e-5)


def test_linear_cross_entropy_reference_matches_the_formula():
    hidden, weight, labels = make(37, 8, 97, 0.6)
    loss, num_correct = linear_cross_entropy_reference(*map(paddle.to_tensor, (hidden, weight, labels)))
    expected_loss, expected_num_correct, _, _ = dense(hidden, weight, labels)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert num_correct == expected_num_correct


def test_linear_cross_entropy_without_targets_is_zero_with_zero_gradients():
    hidden, weight, _ = make(4, 3, 5, 1.0)
    tensors = [paddle.to_tensor(array, stop_gradient=False) for array in (hidden, weight)]
    loss, num_correct = linear_cross_entropy(*tensors, paddle.full([4], -100, "int64"))
    loss.backward()
    assert float(loss) == 0.0 and num_correct == 0
    for tensor in tensors:
        np.testing.assert_array_equal(tensor.grad.numpy(), np.zeros(tensor.shape, np.float32))


def test_linear_cross_entropy_without_gradients_returns_loss_and_num_correct():
    hidden, weight, labels = make(37, 8, 97, 0.6)
    with paddle.no_grad():
        loss, num_correct = linear_cross_entropy(*map(paddle.to_tensor, (hidden, weight, labels)), chunk=8)
    assert loss.stop_gradient
    assert float(loss) == pytest.approx(dense(hidden, weight, labels)[0], rel=1e-6)
    assert num_correct == dense(hidden, weight, labels)[1]


@pytest.mark.parametrize(
    ("implementation", "tolerance"), [("reference", 1e-4), pytest.param("cpp", 0.3, marks=needs_cpp)]
)
def test_linear_cross_entropy_sums_bf16_weight_gradient_in_fp32(implementation, tolerance):
    """Check gradients over many chunks, whose small contributions a bfloat16 sum would lose.

    The C++ matmuls round their inputs to bfloat16. A bfloat16 sum would be wrong by more than 1.
    """
    hidden, weight, labels = make(300, 4, 5, 1.0)
    weight_t = paddle.to_tensor(weight).astype("bfloat16")
    weight_t.stop_gradient = False
    loss, _ = linear_cross_entropy(paddle.to_tensor(hidden), weight_t, paddle.to_tensor(labels), 1, implementation)
    loss.backward()
    expected = dense(hidden, weight_t.astype("float32").numpy(), labels)[3]
    assert weight_t.grad.dtype == paddle.bfloat16
    np.testing.assert_allclose(weight_t.grad.astype("float32").numpy(), expected, rtol=2**-8, atol=tolerance)


@pytest.mark.parametrize("vocab_size", [49152, 50257, 32003])
def test_linear_cross_entropy_with_large_vocabulary_keeps_precision(vocab_size):
    """Check the loss sum, for which Paddle's own sum has a relative error of 2e-4."""
    hidden, weight, labels = make(3, 4, vocab_size, 1.0)
    loss, _ = linear_cross_entropy(*map(paddle.to_tensor, (hidden, 0.1 * weight, labels)))
    assert float(loss) == pytest.approx(dense(hidden, 0.1 * weight, labels)[0], rel=2e-6)


@needs_cpp
def test_linear_cross_entropy_with_frozen_bf16_weight_is_within_rounding():
    hidden, weight, labels = make(37, 40, 97, 0.6)
    weight_t = paddle.to_tensor(weight).astype("bfloat16")
    hidden_t = paddle.to_tensor(hidden, stop_gradient=False)
    loss, _ = linear_cross_entropy(hidden_t, weight_t, paddle.to_tensor(labels), chunk=16)
    loss.backward()
    expected_loss, _, hidden_gradient, _ = dense(hidden, weight_t.astype("float32").numpy(), labels)
    assert float(loss) == pytest.approx(expected_loss, rel=2e-3)
    error = np.linalg.norm(hidden_t.grad.numpy() - hidden_gradient) / np.linalg.norm(hidden_gradient)
    assert hidden_t.grad.dtype == paddle.float32 and 1e-4 < error < 2e-2


@needs_cpp
def test_linear_cross_entropy_holds_logits_of_one_chunk():
    hidden, weight, labels = map(paddle.to_tensor, make(1024, 16, 1024, 1.0))
    hidden.stop_gradient = False

    def used_and_most() -> tuple[int, int]:
        numbers = (ctypes.c_int64 * 3)()
        library.library().buffers_account(numbers)
        return numbers[1], numbers[2]

    library.library().buffers_release()  # resets the peak memory
    before, _ = used_and_most()
    loss, _ = linear_cross_entropy(hidden, weight, labels, chunk=256)
    assert not loss.stop_gradient
    chunk_of_logits = 4 * 256 * 1024
    assert chunk_of_logits <= used_and_most()[1] - before < 2 * chunk_of_logits


@needs_cpp
@pytest.mark.parametrize("chunk", [None, 16, 1])
def test_linear_cross_entropy_in_bf16_returns_trainable_weight_gradient_within_rounding(chunk):
    hidden, weight, labels = make(37, 40, 97, 0.6)
    hidden_t, weight_t = (paddle.to_tensor(array, stop_gradient=False) for array in (hidden, weight))
    with bf16_matmuls():
        loss, _ = linear_cross_entropy(hidden_t, weight_t, paddle.to_tensor(labels), chunk)
    loss.backward()
    _, _, *expected = dense(hidden, weight, labels)
    for tensor, gradient in zip((hidden_t, weight_t), expected, strict=True):
        error = np.linalg.norm(tensor.grad.numpy() - gradient) / np.linalg.norm(gradient)
        assert tensor.grad.dtype == paddle.float32 and 1e-4 < error < 3e-2
