"""Linear layers of groups of rows against the formula in double precision, forward and backward."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import grouped_linear as module
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.ops.grouped_linear import grouped_linear
from paddlenlp_ext.ops.recompute_functions import with_recompute_function
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param("cpp", marks=needs_cpp), "reference"]
COUNTS = [[3, 0, 11, 1], [0, 0, 0], [0, 2], [40, 1, 0, 9]]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    choose = module.grouped_linear_op.choose
    monkeypatch.setattr(module.grouped_linear_op, "choose", lambda x: choose(x, request.param))
    return request.param


def run(counts, parts, frozen=(), dtype="float32", seed=1):
    """Return outputs and gradients of x [N, 7] and the weights [G, 10, 7], and the arrays they come from."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    arrays = (
        normal(seed, int(starts[-1]), 7),
        normal(seed + 1, len(counts), 10, 7),
        normal(seed + 2, int(starts[-1]), 10),
    )
    x, weight = (paddle.to_tensor(array, stop_gradient=i in frozen) for i, array in enumerate(arrays[:2]))
    weight, frozen_weight = weight.astype(dtype).detach(), weight.stop_gradient
    weight.stop_gradient = frozen_weight
    results = grouped_linear(x, weight, starts, parts)
    assert len(results) == parts
    y = paddle.concat(results, axis=-1)
    (y * paddle.to_tensor(arrays[2])).sum().backward()
    values = [None if each is None else each.astype("float32").numpy() for each in (y, x.grad, weight.grad)]
    return values, expected(*arrays, starts)


def expected(x, weight, gradient, starts):
    x, weight, gradient = (each.astype(np.float64) for each in (x, weight, gradient))
    y, x_gradient, weight_gradient = np.zeros_like(gradient), np.zeros_like(x), np.zeros_like(weight)
    for group, (a, b) in enumerate(itertools.pairwise(starts)):
        y[a:b], x_gradient[a:b] = x[a:b] @ weight[group].T, gradient[a:b] @ weight[group]
        weight_gradient[group] = gradient[a:b].T @ x[a:b]
    return y, x_gradient, weight_gradient


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear_matches_the_formula(backend, counts, parts):
    for actual, correct in zip(*run(counts, parts), strict=True):
        np.testing.assert_allclose(actual, correct, rtol=0, atol=2e-5)


def test_grouped_linear_with_a_frozen_weight_or_input_returns_no_gradient_for_it(backend):
    (_, x_gradient, none), (_, correct, _) = run(COUNTS[0], 2, frozen=[1])
    assert none is None
    np.testing.assert_allclose(x_gradient, correct, rtol=0, atol=2e-5)
    (_, none, weight_gradient), (_, _, correct) = run(COUNTS[0], 2, frozen=[0])
    assert none is None
    np.testing.assert_allclose(weight_gradient, correct, rtol=0, atol=2e-5)


def test_grouped_linear_of_bf16_weights_is_near_the_formula(backend):
    values, correct = run(COUNTS[3], 2, dtype="bfloat16")
    for actual, exact in zip(values, correct, strict=True):
        assert np.abs(actual - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason=f"{bf16.unavailable_reason()}")
@pytest.mark.parametrize("counts", [[2, 0, 3], [40, 1, 0, 9]])
def test_grouped_linear_under_bf16_matmuls_is_near_the_formula(counts):
    with bf16.bf16_matmuls():
        values, correct = run(counts, 2)
    for actual, exact in zip(values, correct, strict=True):
        assert np.abs(actual - exact).max() < 0.02 * np.abs(exact).max()


def test_grouped_linear_recomputes_an_input_instead_of_saving_it(backend):
    starts, made = np.array([0, 2, 5], np.int64), []
    x, weight = paddle.to_tensor(normal(1, 5, 7)), paddle.to_tensor(normal(2, 2, 10, 7), stop_gradient=False)
    with_recompute_function(x, lambda: made.append(1) or x * 2)
    grouped_linear(x, weight, starts)[0].sum().backward()
    assert made == [1]
    first = 2 * x.numpy()[:2].sum(0)
    np.testing.assert_allclose(weight.grad.numpy()[0], np.tile(first, (10, 1)), atol=1e-5)
