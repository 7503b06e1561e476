"""Routers against their formulas in NumPy, with ties and groups."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.routers import ROUTERS, Router, RouterOptions
from tests.common.arrays import normal


def route(logits, correction=None, **options):
    correction = None if correction is None else paddle.to_tensor(correction)
    weights, experts = ROUTERS[options["kind"]](paddle.to_tensor(logits), RouterOptions(**options), correction)
    return weights.numpy(), experts.numpy()


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_of_equal_scores_choose_the_lowest_indices(kind):
    weights, experts = route(np.zeros((3, 70), np.float32), kind=kind, top_k=4)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3
    np.testing.assert_allclose(weights, 0.25, rtol=1e-6)
    assert route(np.array([[1, 2, 2, 0, 2]], np.float32), kind=kind, top_k=2)[1].tolist() == [[1, 2]]


def test_softmax_weights_are_scores_normalised_above_the_smallest_sum_and_scaled():
    logits = normal(1, 5, 6)
    scores = softmax(logits)
    experts = np.argsort(-scores, axis=-1)[:, :2]
    chosen = np.take_along_axis(scores, experts, 1)
    sums = chosen.sum(1, keepdims=True)
    for options, expected in [
        ({"normalizes": False}, chosen),
        ({}, chosen / sums),
        ({"smallest_sum": 0.55, "scale": 2.5}, 2.5 * chosen / np.maximum(sums, 0.55)),
    ]:
        weights, found = route(logits, kind="softmax", top_k=2, **options)
        assert np.array_equal(found, experts)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert sums.min() < 0.55 < sums.max()


def test_correction_changes_the_choice_and_not_the_weights():
    logits, correction = normal(1, 4, 5), np.array([0, 0, 9, 0, 0], np.float32)
    weights, experts = route(logits, correction, kind="sigmoid", top_k=2, normalizes=False)
    assert (experts[:, 0] == 2).all()
    np.testing.assert_allclose(weights, np.take_along_axis(1 / (1 + np.exp(-logits)), experts, 1), rtol=1e-5)


def test_softmax_of_chosen_weighs_by_the_logits_of_the_chosen():
    logits = normal(2, 4, 5)
    weights, experts = route(logits, kind="softmax_of_chosen", top_k=3)
    np.testing.assert_allclose(weights, softmax(-np.sort(-logits, axis=1)[:, :3]), rtol=1e-5)
    assert np.array_equal(experts, np.argsort(-logits, axis=1)[:, :3])


@pytest.mark.parametrize(
    ("group_score", "expected"),
    [("max", [0, 2]), ("top2", [2, 3])],  # of the groups (5, 0), (4, 3) and (1, 1), the best by each score
)
def test_groups_limit_the_choice_to_the_best_group(group_score, expected):
    logits = np.array([[5, 0, 4, 3, 1, 1]], np.float32)
    group = {"num_groups": 3, "chosen_groups": 1, "group_score": group_score}
    chosen = route(logits, kind="softmax_of_chosen", top_k=2, **group)[1][0].tolist()
    assert chosen == ([0, 1] if group_score == "max" else expected)


def test_router_computes_in_float32_and_its_correction_is_frozen():
    router = Router(4, 3, RouterOptions(kind="sigmoid", top_k=2, bias=True, correction_dims=2))
    router.weight.set_value(normal(1, 3, 4))
    weights, experts = router(paddle.to_tensor(normal(2, 5, 4)))
    assert weights.dtype == paddle.float32 and experts.shape == [5, 2]
    weights.sum().backward()
    assert router.e_score_correction_bias.shape == [1, 3] and router.e_score_correction_bias.stop_gradient
    assert router.weight.grad is not None and router.bias.grad is not None
