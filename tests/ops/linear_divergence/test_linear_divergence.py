"""Linear layer fused with divergences from a teacher, against the formulas in double precision."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.linear_cross_entropy import cpp
from paddlenlp_ext.ops.linear_divergence import DivergenceOptions, LogitRows, TopRows, linear_divergence
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param("cpp", marks=needs_cpp), "reference"]
ROWS, WIDTH, TEACHER_WIDTH, VOCAB = 37, 8, 5, 97


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def formula(p, q, beta):
    """Return the divergence of each row; p: student, q: teacher."""
    if beta == 0:
        return (q * np.log(q / p)).sum(1)
    if beta == 1:
        return (p * np.log(p / q)).sum(1)
    m = (1 - beta) * p + beta * q
    return beta * (q * np.log(q / m)).sum(1) + (1 - beta) * (p * np.log(p / m)).sum(1)


def gathered(p, ids):
    """Return the probabilities of the tokens at `ids`, and of the set of all other tokens."""
    known = np.take_along_axis(p, ids, 1)
    return np.concatenate([known, 1 - known.sum(1, keepdims=True)], 1)


class Case:
    """Hidden states, weights and labels, and the loss as a function of hidden states and weight of the student."""

    def __init__(self, beta=0.5, temperature=1.0, sft_weight=0.0, softcap=None, top_k=None, seed=3):
        generator = np.random.default_rng(seed)
        self.hidden, self.weight = normal(1, ROWS, WIDTH), normal(2, VOCAB, WIDTH)
        self.teacher_hidden, self.teacher_weight = normal(3, ROWS, TEACHER_WIDTH), normal(4, VOCAB, TEACHER_WIDTH)
        self.labels = generator.integers(0, VOCAB, ROWS)
        self.labels[generator.random(ROWS) > 0.7] = -100
        self.options = DivergenceOptions(beta, temperature, sft_weight)
        self.softcap, self.top_k = softcap, top_k
        self.positions = np.flatnonzero(self.labels != -100)
        logits = self.teacher_hidden.astype(np.float64) @ self.teacher_weight.astype(np.float64).T
        self.teacher = softmax(logits[self.positions] / temperature)
        self.ids = np.argsort(-self.teacher, 1)[:, : top_k or 0]

    def loss(self, hidden, weight):
        logits = hidden[self.positions] @ weight.T
        if self.softcap is not None:
            logits = self.softcap * np.tanh(logits / self.softcap)
        p, q = softmax(logits / self.options.temperature), self.teacher
        if self.top_k is not None:
            p, q = gathered(p, self.ids), gathered(q, self.ids)
        picked = softmax(logits)[np.arange(len(p)), self.labels[self.positions]]
        return (formula(p, q, self.options.beta) - self.options.sft_weight * np.log(picked)).sum()

    def rows(self):
        if self.top_k is not None:
            logps = np.log(np.take_along_axis(self.teacher, self.ids, 1)).astype(np.float32)
            return TopRows(paddle.to_tensor(self.ids), paddle.to_tensor(logps))
        weight = paddle.to_tensor(self.teacher_weight)
        hidden = paddle.to_tensor(self.teacher_hidden[self.positions])
        return LogitRows(hidden, lambda rows: paddle.matmul(rows, weight, transpose_y=True))

    def run(self, backend=None, chunk=128, weight_trains=True):
        hidden = paddle.to_tensor(self.hidden, stop_gradient=False)
        weight = paddle.to_tensor(self.weight, stop_gradient=not weight_trains)
        loss, parts = linear_divergence(
            hidden, weight, paddle.to_tensor(self.labels), self.rows(), self.options, chunk, backend, self.softcap
        )
        (0.25 * loss).backward()
        return loss, parts, hidden.grad, weight.grad

    def check(self, *results):
        """Compare the loss and directional derivatives along random directions with central differences."""
        loss, _, hidden_gradient, weight_gradient = results
        hidden, weight = self.hidden.astype(np.float64), self.weight.astype(np.float64)
        assert float(loss) == pytest.approx(self.loss(hidden, weight), rel=1e-5)
        for seed in range(3):
            of_hidden, of_weight = normal(10 + seed, *hidden.shape), normal(20 + seed, *weight.shape)
            step = 1e-5
            moved = [self.loss(hidden + sign * step * of_hidden, weight) for sign in (1, -1)]
            expected = 0.25 * (moved[0] - moved[1]) / (2 * step)
            assert float((hidden_gradient.numpy() * of_hidden).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-4)
            if weight_gradient is not None:
                moved = [self.loss(hidden, weight + sign * step * of_weight) for sign in (1, -1)]
                expected = 0.25 * (moved[0] - moved[1]) / (2 * step)
                found = float((weight_gradient.numpy() * of_weight).sum())
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_divergence_matches_the_formula(beta, temperature, backend):
    case = Case(beta, temperature)
    case.check(*case.run(backend))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [1, 7])
def test_linear_divergence_from_top_tokens_matches_the_formula_with_a_tail(beta, top_k):
    case = Case(beta, 1.5, top_k=top_k)
    case.check(*case.run())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_linear_divergence_adds_the_cross_entropy_at_temperature_one(temperature):
    case = Case(0.5, temperature, sft_weight=0.4, softcap=2.0)
    results = case.run()
    case.check(*results)
    parts = results[1]
    assert float(results[0]) == pytest.approx(parts.divergence + 0.4 * parts.cross_entropy, rel=1e-5)
    plain = Case(0.5, temperature, softcap=2.0)
    assert parts.divergence == pytest.approx(plain.loss(plain.hidden, plain.weight), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_divergence_with_small_chunks_and_a_frozen_weight_has_the_same_gradient(backend):
    expected, (loss, parts, gradient, none) = Case().run(backend), Case().run(backend, 5, weight_trains=False)
    assert none is None
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-6)
    assert parts.num_correct == expected[1].num_correct
    np.testing.assert_allclose(gradient.numpy(), expected[2].numpy(), rtol=0, atol=1e-6)


def test_linear_divergence_of_equal_models_is_zero_with_zero_gradients():
    for beta in (0.0, 0.5, 1.0):
        for top_k in (None, 7):
            case = Case(beta, top_k=top_k)
            case.teacher_hidden, case.teacher_weight = case.hidden, case.weight
            case.teacher = softmax(case.hidden[case.positions].astype(np.float64) @ case.weight.T.astype(np.float64))
            case.ids = np.argsort(-case.teacher, 1)[:, : top_k or 0]
            loss, _, hidden_gradient, weight_gradient = case.run()
            assert abs(float(loss)) < 1e-5
            assert float(hidden_gradient.abs().max()) < 1e-5 and float(weight_gradient.abs().max()) < 1e-5


def test_linear_divergence_compares_the_tokens_that_both_vocabularies_have():
    case = Case(0.3)
    size = VOCAB - 20
    case.labels = np.where(case.labels >= size, 1, case.labels)
    case.options = DivergenceOptions(0.3, vocab_size=size)
    _, _, _, weight_gradient = case.run()
    smaller = Case(0.3)
    smaller.labels, smaller.weight, smaller.teacher_weight = case.labels, case.weight[:size], case.teacher_weight[:size]
    _, _, _, expected = smaller.run()
    np.testing.assert_allclose(weight_gradient.numpy()[:size], expected.numpy(), rtol=0, atol=1e-5)
    assert not weight_gradient.numpy()[size:].any()


def test_linear_divergence_without_targets_is_zero():
    case = Case()
    case.labels[:] = -100
    loss, parts, gradient, _ = case.run()
    assert float(loss) == 0 and parts.num_correct == 0 and not gradient.numpy().any()


@needs_cpp
def test_linear_divergence_with_a_frozen_bf16_weight_is_within_rounding():
    case = Case(0.3)
    rounded = paddle.to_tensor(case.weight).astype("bfloat16")
    case.weight = rounded.astype("float32").numpy()
    expected = case.run("reference", weight_trains=False)
    hidden = paddle.to_tensor(case.hidden, stop_gradient=False)
    loss, _ = linear_divergence(hidden, rounded, paddle.to_tensor(case.labels), case.rows(), case.options, 9, "cpp")
    (0.25 * loss).backward()
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-2)
    error = (hidden.grad - expected[2]).norm() / expected[2].norm()
    assert float(error) < 2e-2


@needs_cpp
def test_cpp_gradient_of_a_bf16_weight_fills_the_first_half_of_each_row():
    gradient = paddle.to_tensor(normal(5, 3, 7))
    logits, weight = library.empty([3, 7]), library.empty([7, 2], "bfloat16")
    cpp.write_gradient(gradient, logits, weight)
    found = logits.view("bfloat16")[:, :7].astype("float32").numpy()
    np.testing.assert_array_equal(found, gradient.astype("bfloat16").astype("float32").numpy())
