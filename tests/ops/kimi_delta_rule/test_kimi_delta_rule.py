"""Kimi delta rule in chunks against its definition, a loop over positions in float64.

Shapes: T positions, R documents, N heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.kimi_delta_rule import kimi_delta_rule
from tests.common.recurrences import relative_error

N, H, E = 2, 10, 6
LAYOUTS = {
    "documents of 1": AttentionLayout.from_documents([[1, 1], [1, 1]]),
    "chunk borders": AttentionLayout.from_documents([[16, 17, 1, 35]]),
    "branches": AttentionLayout.from_documents(
        [[18, 3, 17, 5], [2, 20, 16, 5]], document_parents=[[None, 0, 0, None], [None, 0, 0, None]]
    ),
}
NAMES = ("q", "k", "v", "decay", "beta", "initial")


def random_inputs(layout: AttentionLayout) -> list[np.ndarray]:
    """Return the inputs of the op, with slow and fast decays."""
    rng, length = np.random.default_rng(0), layout.num_positions
    q_TNH, k_TNH = rng.normal(0, 1, (2, length, N, H))
    decay_TNH = -np.exp(np.linspace(-4, 1.5, H)) * rng.uniform(0, 1, (length, N, H))
    initial_RNHE = rng.normal(0, 1, (len(layout.documents()[0]), N, H, E))
    return [q_TNH, k_TNH, rng.normal(0, 1, (length, N, E)), decay_TNH, rng.uniform(0, 1, (length, N)), initial_RNHE]


def stepwise(layout, q_TNH, k_TNH, v_TNE, decay_TNH, beta_TN, initial_RNHE):
    """Return the outputs and the states after the documents, by the definition."""
    q_TNH, k_TNH = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_TNH, k_TNH))
    outputs, finals = [], []
    for document, (start, length) in enumerate(zip(*layout.documents(), strict=True)):
        parent = layout.parents()[document]
        state_NHE = initial_RNHE[document] if parent < 0 else finals[parent]
        for t in range(start, start + length):
            state_NHE = paddle.exp(decay_TNH[t]).unsqueeze(-1) * state_NHE
            error_NE = v_TNE[t] - (state_NHE * k_TNH[t].unsqueeze(-1)).sum(1)
            state_NHE = state_NHE + k_TNH[t].unsqueeze(-1) * (beta_TN[t].unsqueeze(-1) * error_NE).unsqueeze(1)
            outputs.append((state_NHE * q_TNH[t].unsqueeze(-1)).sum(1) * H**-0.5)
        finals.append(state_NHE)
    return paddle.stack(outputs), paddle.stack(finals)


def check(inputs: list[np.ndarray], layout: AttentionLayout, limit: float) -> None:
    """Check outputs, states and gradients of the op against the definition in float64."""
    rng, results = np.random.default_rng(1), []
    of_outputs = [rng.normal(0, 1, shape) for shape in ((layout.num_positions, N, E), inputs[-1].shape)]
    for dtype in ("float64", "float32"):
        tensors = [paddle.to_tensor(x, dtype, stop_gradient=False) for x in inputs]
        *before, initial = tensors
        pair = stepwise(layout, *tensors) if dtype == "float64" else kimi_delta_rule(*before, layout, initial)
        paddle.autograd.backward([*pair], [paddle.to_tensor(x, dtype) for x in of_outputs])
        results.append([x.numpy() for x in (*pair, *(each.grad for each in tensors))])
    errors = {name: relative_error(b, a) for name, a, b in zip(("o", "final", *NAMES), *results, strict=True)}
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_kimi_delta_rule_equals_its_definition_forward_and_backward(layout):
    check(random_inputs(layout), layout, 3e-6)


def test_kimi_delta_rule_with_equal_keys_solves_a_stiff_system():
    """Test keys and strengths for which the powers of A reach 3432, so that sums of powers lose three digits."""
    layout = AttentionLayout.from_documents([[64]])
    q_TNH, k_TNH, v_TNE, decay_TNH, beta_TN, initial_RNHE = random_inputs(layout)
    k_TNH[:], decay_TNH[:], beta_TN[:] = k_TNH[:1], -1e-3, 0.99
    check([q_TNH, k_TNH, v_TNE, decay_TNH, beta_TN, initial_RNHE], layout, 1e-5)


def test_kimi_delta_rule_gives_no_gradients_to_frozen_inputs():
    layout = AttentionLayout.from_documents([[20]])
    tensors = [
        paddle.to_tensor(x, "float32", stop_gradient=index != 2) for index, x in enumerate(random_inputs(layout))
    ]
    *before, initial = tensors
    kimi_delta_rule(*before, layout, initial)[0].sum().backward()
    assert [x.grad is None for x in tensors] == [True, True, False, True, True, True]
