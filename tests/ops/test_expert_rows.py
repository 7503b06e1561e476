"""Rows of tokens by experts against loops in NumPy, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import expert_rows as module
from paddlenlp_ext.ops.expert_rows import ExpertRows, add_bias, gather_rows, scale_rows, sum_rows
from paddlenlp_ext.ops.recompute_functions import recompute_function, with_recompute_function
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

EXPERTS_TK = np.array([[2, 0], [0, 3], [3, 2], [2, 3], [0, 2]])


@pytest.fixture(params=[pytest.param("cpp", marks=needs_cpp), "reference"])
def backend(request, monkeypatch):
    for op in (module.gather_op, module.sum_op):
        monkeypatch.setattr(op, "choose", lambda x, choose=op.choose: choose(x, request.param))


def test_sort_keeps_every_choice_in_the_order_of_experts_and_tokens():
    rows = ExpertRows.sort(EXPERTS_TK, 4)
    assert rows.starts.tolist() == [0, 3, 3, 7, 10]
    assert rows.tokens.tolist() == [0, 1, 4, 0, 2, 3, 4, 1, 2, 3]
    assert rows.positions[2].tolist() == [8, 4]


def test_sort_of_some_experts_leaves_the_others_out():
    rows = ExpertRows.sort(EXPERTS_TK, 2, first=2)
    assert rows.starts.tolist() == [0, 4, 7] and rows.tokens.tolist() == [0, 2, 3, 4, 1, 2, 3]
    assert rows.positions[0].tolist() == [0, -1] and rows.positions[4].tolist() == [-1, 3]


@pytest.mark.parametrize(("num_experts", "first"), [(4, 0), (2, 2), (1, 1)])
def test_gather_and_sum_match_loops(backend, num_experts, first):
    rows = ExpertRows.sort(EXPERTS_TK, num_experts, first)
    x, gradient_ND, gradient_TD = normal(1, 5, 19), normal(2, len(rows.tokens), 19), normal(3, 5, 19)
    for function, values, gradient in ((gather_rows, x, gradient_ND), (sum_rows, gradient_ND, gradient_TD)):
        tensor = paddle.to_tensor(values, stop_gradient=False)
        y = function(tensor, rows)
        (y * paddle.to_tensor(gradient)).sum().backward()
        gathered = (gradient if function is sum_rows else values)[rows.tokens]
        summed = np.zeros_like(x)
        np.add.at(summed, rows.tokens, gradient_ND)
        expected = (gathered, summed) if function is gather_rows else (summed, gathered)
        for actual, correct in zip((y, tensor.grad), expected, strict=True):
            np.testing.assert_allclose(actual.numpy(), correct, rtol=0, atol=1e-6)


def test_gather_rows_can_be_recomputed(backend):
    rows = ExpertRows.sort(EXPERTS_TK, 4)
    gathered = gather_rows(paddle.to_tensor(normal(1, 5, 19)), rows)
    make = recompute_function(gathered)
    assert make is not None and np.array_equal(make().numpy(), gathered.numpy())


@pytest.mark.parametrize("recomputes", [False, True])
def test_scale_rows_matches_the_formula(recomputes):
    x, scale, gradient = normal(1, 6, 5), normal(2, 6), normal(3, 6, 5)
    tensors = [paddle.to_tensor(each, stop_gradient=False) for each in (x, scale)]
    product = tensors[0] * 1.0
    if recomputes:
        product = with_recompute_function(product, lambda: paddle.to_tensor(x))
    y = scale_rows(product, tensors[1])
    if recomputes:
        assert np.array_equal(recompute_function(y)().numpy(), y.numpy())
    (y * paddle.to_tensor(gradient)).sum().backward()
    expected = x * scale[:, None], gradient * scale[:, None], (gradient * x).sum(1)
    for actual, correct in zip((y, tensors[0].grad, tensors[1].grad), expected, strict=True):
        np.testing.assert_allclose(actual.numpy(), correct, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_add_bias_matches_loops(scaled):
    rows = ExpertRows.sort(EXPERTS_TK, 4)
    experts = np.sort(EXPERTS_TK.reshape(-1))
    arrays = normal(1, 10, 5), normal(2, 4, 5), normal(3, 10), normal(4, 10, 5)
    x, bias, scale = (paddle.to_tensor(each, stop_gradient=False) for each in arrays[:3])
    y = add_bias(x, bias, rows, scale if scaled else None)
    (y * paddle.to_tensor(arrays[3])).sum().backward()
    factors = arrays[2][:, None] if scaled else 1.0
    np.testing.assert_allclose(y.numpy(), arrays[0] + arrays[1][experts] * factors, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(x.grad.numpy(), arrays[3])
    expected = np.zeros_like(arrays[1])
    np.add.at(expected, experts, arrays[3] * factors)
    np.testing.assert_allclose(bias.grad.numpy(), expected, rtol=0, atol=1e-5)
    assert not bias.grad.numpy()[1].any()
    if scaled:
        np.testing.assert_allclose(scale.grad.numpy(), (arrays[3] * arrays[1][experts]).sum(1), rtol=0, atol=1e-5)
