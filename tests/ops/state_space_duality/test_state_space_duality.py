"""State space duality: values and derivatives against the stepwise definition, documents, branches and states.

Shapes: T positions, R documents, G groups, N heads, H state dimension, E head dimension.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.state_space_duality import state_space_duality, state_space_duality_op

NAMES = ("c", "b", "dx", "decay", "initial")
LAYOUTS = {
    "documents of 1": AttentionLayout.from_documents([[1, 1, 1]]),
    "odd lengths": AttentionLayout.from_documents([[61, 3, 1, 89], [100, 54]]),
    "branches": AttentionLayout.from_documents([[70, 5, 1, 66, 64, 130]], document_parents=[[None, 0, 0, 0, None, 4]]),
}


def random_inputs(layout: AttentionLayout, groups: int, heads: int, state_dim: int, head_dim: int) -> list[np.ndarray]:
    """Return C, B, d x, decays between e^-1e-5 and e^-20, and initial states."""
    count, rng = layout.num_positions, np.random.default_rng(0)
    return [
        rng.normal(0, 1, (count, groups, state_dim)),
        rng.normal(0, 1, (count, groups, state_dim)),
        rng.normal(0, 1, (count, heads, head_dim)),
        -(10 ** rng.uniform(-5, 1.3, (count, heads))),
        rng.normal(0, 1, (len(layout.documents()[0]), heads, state_dim, head_dim)),
    ]


def stepwise(inputs: list[np.ndarray], layout: AttentionLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return y [T, N, E] and the final states [R, N, H, E]."""
    c_TGH, b_TGH, dx_TNE, decay_TN, initial_RNHE = inputs
    c_TNH, b_TNH = (np.repeat(x_TGH, dx_TNE.shape[1] // x_TGH.shape[1], axis=1) for x_TGH in (c_TGH, b_TGH))
    outputs, finals = [], []
    for document, (start, length) in enumerate(zip(*layout.documents(), strict=True)):
        parent = layout.parents()[document]
        state_NHE = initial_RNHE[document] if parent < 0 else finals[parent]
        for t in range(start, start + length):
            added_NHE = np.einsum("nh,ne->nhe", b_TNH[t], dx_TNE[t])
            state_NHE = np.exp(decay_TN[t])[:, None, None] * state_NHE + added_NHE
            outputs.append(np.einsum("nhe,nh->ne", state_NHE, c_TNH[t]))
        finals.append(state_NHE)
    return np.stack(outputs), np.stack(finals)


def output_gradients(inputs: list[np.ndarray]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(0, 1, inputs[2].shape), rng.normal(0, 1, inputs[4].shape)]


def run(
    backend: str, inputs: list[np.ndarray], layout: AttentionLayout, dtype: paddle.dtype
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the outputs, and the gradients of the inputs for `output_gradients`."""
    tensors = [paddle.to_tensor(x, dtype, stop_gradient=False) for x in inputs]
    outputs = state_space_duality_op.choose(tensors[2], backend)(*tensors[:4], layout, tensors[4])
    gradients = [paddle.to_tensor(x, dtype) for x in output_gradients(inputs)]
    paddle.autograd.backward(list(outputs), gradients)
    return [x.numpy() for x in outputs], [x.grad.numpy() for x in tensors if x.grad is not None]


@pytest.mark.parametrize("backend", state_space_duality_op.backends)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 4, 5, 3), (2, 4, 20, 32)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(paddle.float64, 1e-12), (paddle.float32, 1e-5)])
def test_state_space_duality_equals_the_stepwise_definition(backend, layout, sizes, dtype, tolerance):
    """Test each gradient along a random direction, with the derivative of the definition from a complex step."""
    inputs = random_inputs(layout, *sizes)
    found, gradients = run(backend, inputs, layout, dtype)
    for x, expected in zip(found, stepwise(inputs, layout), strict=True):
        assert np.abs(x - expected).max() < tolerance * np.abs(expected).max()
    of_outputs, rng, step = output_gradients(inputs), np.random.default_rng(2), 1e-30
    for index, name in enumerate(NAMES):
        direction = rng.normal(0, 1, inputs[index].shape)
        moved = [*inputs[:index], inputs[index] + 1j * step * direction, *inputs[index + 1 :]]
        pairs = zip(stepwise(moved, layout), of_outputs, strict=True)
        derivative = sum((x * of_x).sum().imag for x, of_x in pairs) / step
        terms = gradients[index] * direction
        assert abs(terms.sum() - derivative) < tolerance * np.sqrt((terms**2).sum()), name


@pytest.mark.parametrize("backend", state_space_duality_op.backends)
def test_state_space_duality_of_packed_documents_has_the_bits_of_the_documents_alone(backend):
    packed, alone = (AttentionLayout.from_documents([lengths]) for lengths in ([70, 90, 28], [90]))
    inputs = random_inputs(packed, 2, 4, 20, 32)
    inputs[0][:70] = np.nan
    own = [*(x[70:160] for x in inputs[:4]), inputs[4][1:2]]
    tensors, own_tensors = ([paddle.to_tensor(x, "float32") for x in each] for each in (inputs, own))
    op = state_space_duality_op.choose(tensors[2], backend)
    y_TNE, final_RNHE = op(*tensors[:4], packed, tensors[4])
    own_y_TNE, own_final_RNHE = op(*own_tensors[:4], alone, own_tensors[4])
    np.testing.assert_array_equal(y_TNE[70:160].numpy(), own_y_TNE.numpy())
    np.testing.assert_array_equal(final_RNHE[1:2].numpy(), own_final_RNHE.numpy())


def test_state_space_duality_returns_the_dtype_of_the_inputs_and_float32_states():
    layout = LAYOUTS["odd lengths"]
    c, b, dx, decay, _ = random_inputs(layout, 1, 4, 5, 3)
    c, b, dx = (paddle.to_tensor(x, "bfloat16") for x in (c, b, dx))
    decay = paddle.to_tensor(decay, "float32")
    y_TNE, final_RNHE = state_space_duality(c, b, dx, decay, layout)
    assert (y_TNE.dtype, final_RNHE.dtype) == (paddle.bfloat16, paddle.float32)
    c, b, dx = (x.astype("float32") for x in (c, b, dx))
    expected_TNE, _ = state_space_duality(c, b, dx, decay, layout)
    np.testing.assert_array_equal(y_TNE.astype("float32").numpy(), expected_TNE.astype("bfloat16").astype("float32"))
