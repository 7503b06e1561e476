"""Cross entropy of rows of logits against the formula in double precision: loss, correct predictions, gradient."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.cpp.library import set_threads
from paddlenlp_ext.ops.linear_cross_entropy.cpp import cross_entropy_cpp
from paddlenlp_ext.ops.linear_cross_entropy.reference import cross_entropy_reference
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param(cross_entropy_cpp, marks=needs_cpp), cross_entropy_reference]


def formula(
    logits: np.ndarray, targets: np.ndarray, softcap: float | None = None
) -> tuple[np.ndarray, int, np.ndarray]:
    """Return losses, the number of correct predictions, and the gradient of the logits before the soft-cap."""
    logits, slope = logits.astype(np.float64), 1.0
    if softcap is not None:
        ratio = np.tanh(logits / softcap)
        logits, slope = softcap * ratio, 1 - ratio**2
    largest = logits.max(1, keepdims=True)
    exponentials = np.exp(logits - largest)
    sums = exponentials.sum(1, keepdims=True)
    rows = np.arange(len(targets))
    losses = np.log(sums[:, 0]) + largest[:, 0] - logits[rows, targets]
    gradient = exponentials / sums
    gradient[rows, targets] -= 1
    return losses, int((logits.argmax(1) == targets).sum()), gradient * slope


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 2), (3, 17), (37, 1031), (2, 49152)])
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_cross_entropy_matches_the_formula(backend, num_rows, num_columns, scale):
    logits = scale * normal(num_rows, num_rows, num_columns) - 7.0  # negative, to detect zero padding in the maximum
    targets = np.random.default_rng(0).integers(0, num_columns, num_rows)
    targets[0] = logits[0].argmax()
    expected_losses, expected_num_correct, gradient = formula(logits, targets)
    tensor = paddle.to_tensor(logits)
    losses, num_correct = backend(tensor, paddle.to_tensor(targets), True)
    np.testing.assert_allclose(losses.numpy(), expected_losses, rtol=2e-6, atol=4e-6)
    assert num_correct == expected_num_correct >= 1
    np.testing.assert_allclose(tensor.numpy(), gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 2), (3, 17), (37, 1031)])
@pytest.mark.parametrize("softcap", [2.5, 8.0, 300.0])
def test_cross_entropy_with_softcap_matches_the_formula(backend, num_rows, num_columns, softcap):
    logits = 4.0 * normal(num_rows, num_rows, num_columns) - 2.0
    targets = np.random.default_rng(0).integers(0, num_columns, num_rows)
    targets[0] = logits[0].argmax()
    expected_losses, expected_num_correct, gradient = formula(logits, targets, softcap)
    tensor = paddle.to_tensor(logits)
    losses, num_correct = backend(tensor, paddle.to_tensor(targets), True, softcap)
    np.testing.assert_allclose(losses.numpy(), expected_losses, rtol=2e-6, atol=4e-6)
    assert num_correct == expected_num_correct
    np.testing.assert_allclose(tensor.numpy(), gradient, rtol=0, atol=1e-6)


@needs_cpp
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 2), (3, 17), (37, 1031)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_cross_entropy_cpp_with_bf16_gradient_rounds_the_fp32_one(num_rows, num_columns, threads, softcap, cpp_threads):
    cpp_threads(threads)
    logits, targets = 5.0 * normal(1, num_rows, num_columns), paddle.arange(num_rows) % num_columns
    exact, rounded = paddle.to_tensor(logits), paddle.to_tensor(logits)
    expected, found = (
        cross_entropy_cpp(exact, targets, True, softcap),
        cross_entropy_cpp(rounded, targets, True, softcap, bf16_gradient=True),
    )
    np.testing.assert_array_equal(found[0].numpy(), expected[0].numpy())
    assert found[1] == expected[1]
    first_halves = np.ascontiguousarray(rounded.numpy()).view(np.uint16)[:, :num_columns]
    actual = (first_halves.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(actual, exact.astype("bfloat16").astype("float32").numpy())


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy_without_gradient_returns_same_loss_and_num_correct(backend):
    logits, targets = normal(1, 5, 33), np.array([0, 32, 16, 1, 15])
    expected_losses, expected_num_correct, _ = formula(logits, targets)
    losses, num_correct = backend(paddle.to_tensor(logits), paddle.to_tensor(targets), False)
    np.testing.assert_allclose(losses.numpy(), expected_losses, rtol=1e-6, atol=1e-6)
    assert num_correct == expected_num_correct


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy_with_equal_logits_predicts_the_first(backend):
    logits = np.zeros([3, 40], np.float32)
    logits[:, [7, 35]] = 1.0
    _, num_correct = backend(paddle.to_tensor(logits), paddle.to_tensor([7, 35, 0]), True)
    assert num_correct == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy_with_nan_logit_returns_nan(backend):
    logits = normal(1, 2, 33)
    logits[1, 20] = np.nan
    losses, _ = backend(paddle.to_tensor(logits), paddle.to_tensor([3, 4]), True)
    assert np.isnan(losses.numpy()).any()


@needs_cpp
def test_cross_entropy_cpp_with_other_thread_counts_gives_same_bits():
    logits, targets = normal(1, 19, 1031), np.arange(19)
    runs = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        tensor = paddle.to_tensor(logits)
        losses, _ = cross_entropy_cpp(tensor, paddle.to_tensor(targets), True)
        runs.append((losses.numpy(), tensor.numpy()))
    set_threads(threads_per_process())
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1], runs[1][1])


@needs_cpp
def test_cross_entropy_cpp_with_label_outside_vocabulary_raises_value_error():
    with pytest.raises(ValueError, match="labels range from 0 to 9, but must be from 0 to 8"):
        cross_entropy_cpp(paddle.to_tensor(normal(1, 2, 9)), paddle.to_tensor([0, 9]), True)
