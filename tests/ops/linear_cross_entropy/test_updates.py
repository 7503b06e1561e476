"""Low-rank updates of the logits: loss and gradients against the formula with the concatenated factors.

h W^T + u B^T + v C^T = [h, u, v] [W, B, C]^T
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy, token_logprobs
from tests.common.arrays import normal
from tests.ops.linear_cross_entropy import test_linear_cross_entropy as summed
from tests.ops.linear_cross_entropy import test_token_logprobs as single

WIDTHS = (8, 3, 1)  # of h, u and v


def make(labels: np.ndarray, vocab_size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the rows h, u, v and the weights W, B, C."""
    rows = [normal(5 + width, len(labels), width) for width in WIDTHS]
    return rows, [normal(9 + width, vocab_size, width) for width in WIDTHS]


def tensors_of(arrays: list[np.ndarray], trains: tuple[bool, ...]) -> list[paddle.Tensor]:
    return [paddle.to_tensor(x, stop_gradient=not train) for x, train in zip(arrays, trains, strict=True)]


def check_gradients(tensors: list[paddle.Tensor], expected: np.ndarray, trains: tuple[bool, ...]) -> None:
    """Compare gradients with the parts of that of the concatenation; frozen tensors have none."""
    parts = np.split(expected, np.cumsum(WIDTHS)[:-1], axis=1)
    for tensor, part, train in zip(tensors, parts, trains, strict=True):
        assert (tensor.grad is not None) == train
        if train:
            np.testing.assert_allclose(tensor.grad.numpy(), part, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("weights_train", [(False, True, True), (True, False, True)])
@pytest.mark.parametrize("backend", summed.BACKENDS)
def test_linear_cross_entropy_with_updates_matches_the_formula(chunk, weights_train, backend):
    labels = summed.make(37, 8, 97, 0.6)[2]
    rows, weights = make(labels, 97)
    xs, ws = tensors_of(rows, (True, True, False)), tensors_of(weights, weights_train)
    updates = list(zip(xs[1:], ws[1:], strict=True))
    loss, num_correct = linear_cross_entropy(xs[0], ws[0], paddle.to_tensor(labels), chunk, backend, updates=updates)
    (loss * 0.25).backward()
    expected, expected_correct, of_rows, of_weights = summed.dense(np.hstack(rows), np.hstack(weights), labels)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert num_correct == expected_correct
    check_gradients(xs, 0.25 * of_rows, (True, True, False))
    check_gradients(ws, 0.25 * of_weights, weights_train)


@pytest.mark.parametrize("weights_train", [(False, True, False), (False, False, False)])
@pytest.mark.parametrize("backend", single.BACKENDS)
def test_token_logprobs_with_updates_match_the_formula(weights_train, backend):
    _, _, labels, gradients = single.make()
    rows, weights = make(labels, 97)
    xs, ws = tensors_of(rows, (True, True, True)), tensors_of(weights, weights_train)
    updates = list(zip(xs[1:], ws[1:], strict=True))
    logprobs = token_logprobs(xs[0], ws[0], paddle.to_tensor(labels), 7, backend, updates=updates)
    (logprobs * paddle.to_tensor(gradients)).sum().backward()
    expected, of_rows, of_weights = single.dense(np.hstack(rows), np.hstack(weights), labels, gradients)
    np.testing.assert_allclose(logprobs.numpy(), expected, rtol=2e-6, atol=2e-6)
    check_gradients(xs, of_rows, (True, True, True))
    check_gradients(ws, of_weights, weights_train)


@pytest.mark.parametrize("backend", summed.BACKENDS)
def test_linear_cross_entropy_with_updates_of_a_bf16_weight_is_within_rounding(backend):
    labels = summed.make(37, 8, 97, 0.6)[2]
    rows, weights = make(labels, 97)
    xs, ws = tensors_of(rows, (True, True, True)), tensors_of(weights, (True, True, True))
    base = ws[0].detach().astype("bfloat16")
    loss, _ = linear_cross_entropy(
        xs[0], base, paddle.to_tensor(labels), 16, backend, updates=list(zip(xs[1:], ws[1:], strict=True))
    )
    loss.backward()
    weights[0] = base.astype("float32").numpy()
    expected, _, of_rows, of_weights = summed.dense(np.hstack(rows), np.hstack(weights), labels)
    assert float(loss) == pytest.approx(expected, rel=0.02)
    for tensors, gradient in ((xs, of_rows), (ws[1:], of_weights[:, WIDTHS[0] :])):
        found = np.hstack([tensor.grad.numpy() for tensor in tensors])
        assert np.linalg.norm(found - gradient) <= 0.02 * np.linalg.norm(gradient)


def test_linear_cross_entropy_with_updates_without_targets_has_zero_gradients():
    rows, weights = make(np.zeros(4, np.int64), 5)
    xs, ws = tensors_of(rows, (True,) * 3), tensors_of(weights, (True,) * 3)
    updates = list(zip(xs[1:], ws[1:], strict=True))
    loss, num_correct = linear_cross_entropy(xs[0], ws[0], paddle.full([4], -100, "int64"), updates=updates)
    loss.backward()
    assert float(loss) == 0.0 and num_correct == 0
    assert not any(tensor.grad.numpy().any() for tensor in (*xs, *ws))
