"""Gated delta rule: values and gradients against the stepwise definition, documents, branches and states."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.doctor.devices_and_dtypes import paddle_dtype
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule import gated_delta_rule_op
from tests.common.marks import needs_cpp
from tests.ops.gated_delta_rule.stepwise import Inputs, backward, forward

BACKENDS = [pytest.param(name, marks=needs_cpp if name == "cpp" else ()) for name in gated_delta_rule_op.backends]
LAYOUTS = {
    "documents of 1": AttentionLayout.from_documents([[1, 1, 1], [1, 1, 1]]),
    "odd lengths": AttentionLayout.from_documents([[61, 3, 1, 89], [100, 54]]),
    "chunk borders": AttentionLayout.from_documents([[64, 65, 128, 190]]),
    "branches": AttentionLayout.from_documents(
        [[70, 5, 1, 66, 3, 130], [9, 80, 7, 64, 64, 51]],
        document_parents=[[None, 0, 0, 0, None, 4], [None, 0, 0, None, 3, 3]],
    ),
}
SHAPES = [(2, 2, 4, 4), (2, 4, 5, 3), (1, 3, 8, 24), (2, 4, 20, 32)]  # G, N, H, E


def random_inputs(layout: AttentionLayout, shape: tuple[int, int, int, int], seed: int = 0) -> Inputs:
    """Return random float64 inputs, with decays between e^-1e-5 and e^-20."""
    key_heads, heads, key_dim, value_dim = shape
    count, documents = layout.num_positions, len(layout.documents()[0])
    rng = np.random.default_rng(seed)
    return Inputs(
        q=rng.normal(0, 1, (count, key_heads, key_dim)),
        k=rng.normal(0, 1, (count, key_heads, key_dim)),
        v=rng.normal(0, 1, (count, heads, value_dim)),
        decay=-(10 ** rng.uniform(-5, 1.3, (count, heads))),
        beta=rng.uniform(0, 2, (count, heads)),
        initial=rng.normal(0, 1, (documents, heads, key_dim, value_dim)),
    )


def run(
    backend: str, inputs: Inputs, layout: AttentionLayout, of_o: np.ndarray, of_final: np.ndarray, **dtypes: str
) -> tuple[np.ndarray, np.ndarray, Inputs]:
    """Return the outputs, the final states and the gradients of a backend; `dtypes` names the dtypes of inputs."""
    tensors = {
        name: paddle.to_tensor(x, paddle_dtype(dtypes.get(name, "float32")), stop_gradient=False)
        for name, x in inputs.__dict__.items()
    }
    *before, initial = tensors.values()
    o, final = gated_delta_rule_op.choose(tensors["v"], backend)(*before, layout, initial)
    paddle.autograd.backward([o, final], [paddle.to_tensor(of_o, o.dtype), paddle.to_tensor(of_final, final.dtype)])
    return _numpy(o), _numpy(final), Inputs(*(_numpy(x.grad) for x in tensors.values()))


def _numpy(x: Any) -> np.ndarray:
    return x.astype("float32").numpy() if x.dtype == paddle.bfloat16 else x.numpy()


def output_gradients(inputs: Inputs, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, inputs.v.shape), rng.normal(0, 1, inputs.initial.shape)


def relative_error(x: np.ndarray, expected: np.ndarray) -> float:
    return np.abs(x - expected).max() / np.abs(expected).max()


def check(backend: str, inputs: Inputs, layout: AttentionLayout, tolerance: float, **dtypes: str) -> None:
    """Compare the outputs and all gradients with the stepwise definition."""
    of_o, of_final = output_gradients(inputs)
    o, final, gradients = run(backend, inputs, layout, of_o, of_final, **dtypes)
    expected_o, expected_final, _ = forward(inputs, layout)
    expected = backward(inputs, layout, of_o, of_final)
    errors = {"o": relative_error(o, expected_o), "final": relative_error(final, expected_final)}
    for name, x in gradients.__dict__.items():
        errors[name] = relative_error(x, getattr(expected, name))
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "beta", "initial"])
def test_stepwise_backward_has_the_derivatives_of_the_forward_pass(name):
    """Test the definition itself, with the derivative along a random direction from a complex step."""
    layout = AttentionLayout.from_documents([[3, 1, 4, 2]], document_parents=[[None, 0, 0, None]])
    inputs = random_inputs(layout, (2, 4, 3, 2))
    of_o, of_final = output_gradients(inputs)
    direction, step = np.random.default_rng(2).normal(0, 1, getattr(inputs, name).shape), 1e-30
    moved = Inputs(**{**inputs.__dict__, name: getattr(inputs, name) + 1j * step * direction})
    o, final, _ = forward(moved, layout)
    derivative = ((o * of_o).sum() + (final * of_final).sum()).imag / step
    gradient = getattr(backward(inputs, layout, of_o, of_final), name)
    np.testing.assert_allclose((gradient * direction).sum(), derivative, rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_in_float64_equals_the_stepwise_definition(layout, shape):
    names = Inputs.__dataclass_fields__
    check("reference", random_inputs(layout, shape), layout, 1e-12, **dict.fromkeys(names, "float64"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_delta_rule_equals_the_stepwise_definition(backend, layout, shape):
    check(backend, random_inputs(layout, shape), layout, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", [-1e-6, -30.0])
def test_gated_delta_rule_with_uniform_decays_keeps_float32_precision(backend, decay):
    """Test decays that hardly change the state in a document, and decays whose sum over a chunk reaches -1900."""
    layout = AttentionLayout.from_documents([[700]])
    inputs = random_inputs(layout, (1, 2, 16, 16))
    inputs.decay[:] = decay
    inputs.decay[100:400:3] = -1e-3
    check(backend, inputs, layout, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule_of_packed_documents_has_the_bits_of_the_documents_alone(backend):
    """Test outputs, states and gradients of a document and its branches with other documents before and after them."""
    packed = AttentionLayout.from_documents([[70, 90, 3, 65, 28]], document_parents=[[None, None, 1, 1, None]])
    alone = AttentionLayout.from_documents([[90, 3, 65]], document_parents=[[None, 0, 0]])
    inputs = random_inputs(packed, (2, 4, 20, 32))
    gradients = output_gradients(inputs)
    positions, documents = slice(70, 228), slice(1, 4)
    own = Inputs(*(x[positions] for x in list(inputs)[:-1]), initial=inputs.initial[documents])
    o, final, found = run(backend, inputs, packed, *gradients)
    own_o, own_final, own_found = run(backend, own, alone, gradients[0][positions], gradients[1][documents])
    np.testing.assert_array_equal(o[positions], own_o)
    np.testing.assert_array_equal(final[documents], own_final)
    for name in Inputs.__dataclass_fields__:
        part = getattr(found, name)[documents if name == "initial" else positions]
        np.testing.assert_array_equal(part, getattr(own_found, name), err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule_does_not_read_nan_of_other_documents(backend):
    layout = AttentionLayout.from_documents([[66, 5, 70]])
    inputs = random_inputs(layout, (2, 4, 5, 3))
    of_o, of_final = output_gradients(inputs)
    o, final, gradients = run(backend, inputs, layout, of_o, of_final)
    for x in (*list(inputs)[:-1], of_o):
        x[66:71] = np.nan
    inputs.initial[1] = of_final[1] = np.nan
    with_nan_o, with_nan_final, with_nan_gradients = run(backend, inputs, layout, of_o, of_final)
    others, other_documents = np.r_[:66, 71:141], [0, 2]
    np.testing.assert_array_equal(with_nan_o[others], o[others])
    np.testing.assert_array_equal(with_nan_final[other_documents], final[other_documents])
    for name in Inputs.__dataclass_fields__:
        rows = other_documents if name == "initial" else others
        np.testing.assert_array_equal(getattr(with_nan_gradients, name)[rows], getattr(gradients, name)[rows], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule_reads_bfloat16_and_returns_the_dtype_of_the_values(backend):
    layout = AttentionLayout.from_documents([[5, 70]])
    inputs = random_inputs(layout, (2, 4, 5, 3))
    for name in "qkv":  # values that bfloat16 represents
        rounded = paddle.to_tensor(getattr(inputs, name), "bfloat16").astype("float32").numpy()
        setattr(inputs, name, rounded.astype(np.float64))
    check(backend, inputs, layout, 2**-7, q="bfloat16", k="bfloat16", v="bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule_without_initial_states_starts_from_zeros(backend):
    layout = AttentionLayout.from_documents([[5, 70]])
    inputs = random_inputs(layout, (2, 4, 5, 3))
    inputs.initial[:] = 0
    *tensors, initial = (paddle.to_tensor(x, "float32") for x in inputs)
    op = gated_delta_rule_op.choose(tensors[2], backend)
    for found, expected in zip(op(*tensors, layout), op(*tensors, layout, initial), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule_continued_from_a_state_equals_one_pass(backend):
    """Test a prefix followed by single positions, as in decoding."""
    whole = AttentionLayout.from_documents([[80]])
    inputs = random_inputs(whole, (2, 4, 5, 3))
    *tensors, state = (paddle.to_tensor(x, "float32") for x in inputs)
    op = gated_delta_rule_op.choose(tensors[2], backend)
    expected, expected_state = op(*tensors, whole, state)
    outputs = []
    for start, end in [(0, 77), (77, 78), (78, 79), (79, 80)]:
        part = AttentionLayout.from_documents([[end - start]])
        o, state = op(*(x[start:end] for x in tensors), part, state)
        outputs.append(o)
    assert relative_error(paddle.concat(outputs).numpy(), expected.numpy()) < 1e-5
    assert relative_error(state.numpy(), expected_state.numpy()) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule_with_a_gradient_of_one_input_equals_the_full_gradient(backend):
    layout = AttentionLayout.from_documents([[5, 70]])
    inputs = random_inputs(layout, (2, 4, 5, 3))
    of_o, of_final = output_gradients(inputs)
    expected = run(backend, inputs, layout, of_o, np.zeros_like(of_final))[2]
    tensors = [paddle.to_tensor(x, "float32") for x in inputs]
    for tensor, name in zip(tensors, Inputs.__dataclass_fields__, strict=True):
        tensor.stop_gradient = False
        *before, initial = tensors
        o, _ = gated_delta_rule_op.choose(tensors[2], backend)(*before, layout, initial)
        (o * paddle.to_tensor(of_o, "float32")).sum().backward()
        assert tensor.grad is not None
        np.testing.assert_array_equal(tensor.grad.numpy(), getattr(expected, name), err_msg=name)
        tensor.stop_gradient = True
