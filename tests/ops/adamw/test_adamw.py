"""AdamW backends against the published formula in double precision, and against Paddle's kernel."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.adamw import AdamWUpdate
from paddlenlp_ext.ops.adamw.cpp import adamw_cpp
from paddlenlp_ext.ops.adamw.reference import adamw_reference
from paddlenlp_ext.ops.cpp.library import set_threads
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8
SHAPES = [[1], [17, 3], [8, 576], [131, 257]]
RATES, DECAYS = [1e-2, 1e-3, 4e-2, 1e-2], [0.0, 0.1, 0.1, 0.0]
BACKENDS = [pytest.param(adamw_cpp, marks=needs_cpp), adamw_reference]


def start() -> list[list[paddle.Tensor]]:
    """Return parameter, both moments and both powers of each tensor."""
    return [
        [
            paddle.to_tensor(normal(index, *shape)),
            *(paddle.zeros(shape) for _ in range(2)),
            *(paddle.full([1], beta) for beta in (BETA1, BETA2)),
        ]
        for index, shape in enumerate(SHAPES)
    ]


def gradients_of(step: int) -> list[np.ndarray]:
    return [10.0**-index * normal(100 * step + index, *shape) for index, shape in enumerate(SHAPES)]


def run(backend, num_steps: int) -> list[list[paddle.Tensor]]:
    tensors = start()
    for step in range(1, num_steps + 1):
        gradients = map(paddle.to_tensor, gradients_of(step))
        updates = [
            AdamWUpdate(own[0], gradient, *own[1:], rate, decay)
            for own, gradient, rate, decay in zip(tensors, gradients, RATES, DECAYS, strict=True)
        ]
        backend(updates, BETA1, BETA2, EPSILON)
    return tensors


@pytest.mark.parametrize("backend", BACKENDS)
def test_adamw_over_five_steps_follows_the_formula(backend):
    actual = run(backend, 5)
    for index, (parameter, *_) in enumerate(start()):
        expected = parameter.numpy().astype(np.float64)
        first, second = np.zeros_like(expected), np.zeros_like(expected)
        for step in range(1, 6):
            gradient = gradients_of(step)[index].astype(np.float64)
            first = BETA1 * first + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * gradient**2
            expected *= 1 - RATES[index] * DECAYS[index]
            mean, mean_square = first / (1 - BETA1**step), second / (1 - BETA2**step)
            expected -= RATES[index] * mean / (np.sqrt(mean_square) + EPSILON)
        np.testing.assert_allclose(actual[index][0].numpy(), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(actual[index][1].numpy(), first, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(actual[index][2].numpy(), second, rtol=1e-5, atol=1e-9)
        powers = [actual[index][3].item(), actual[index][4].item()]
        assert powers == pytest.approx([BETA1**6, BETA2**6])


@needs_cpp
def test_adamw_cpp_matches_paddles_kernel():
    actual = run(adamw_cpp, 5)
    for index, (weight, *_) in enumerate(start()):
        parameter = paddle.create_parameter(weight.shape, "float32")
        parameter.set_value(weight)
        optimizer = paddle.optimizer.AdamW(RATES[index], BETA1, BETA2, EPSILON, [parameter], DECAYS[index])
        for step in range(1, 6):
            parameter.grad = paddle.to_tensor(gradients_of(step)[index])
            optimizer.step()
            optimizer.clear_grad()
        state = [optimizer._accumulators[kind][parameter.name] for kind in ("moment1", "moment2")]
        for own, theirs in zip(actual[index], [parameter, *state], strict=False):
            np.testing.assert_allclose(own.numpy(), theirs.numpy(), rtol=2e-6, atol=1e-7)


@needs_cpp
def test_adamw_cpp_with_other_thread_counts_gives_same_bits():
    runs = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        runs.append([tensor.numpy() for own in run(adamw_cpp, 2) for tensor in own])
    set_threads(threads_per_process())
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


@needs_cpp
def test_adamw_cpp_reads_strided_gradients():
    one, other = start()[1], start()[1]
    gradient = normal(5, 17, 3)
    strided = paddle.to_tensor(np.ascontiguousarray(gradient.T)).transpose([1, 0])
    adamw_cpp([AdamWUpdate(one[0], strided, *one[1:], 0.1, 0.1)], BETA1, BETA2, EPSILON)
    adamw_cpp([AdamWUpdate(other[0], paddle.to_tensor(gradient), *other[1:], 0.1, 0.1)], BETA1, BETA2, EPSILON)
    np.testing.assert_array_equal(one[0].numpy(), other[0].numpy())
