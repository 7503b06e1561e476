"""Recurrent ops on packed documents, branches, states and single positions, in every backend."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from tests.common.marks import needs_cpp
from tests.common.recurrences import (
    BACKENDS,
    DEFINITIONS,
    LAYOUTS,
    check,
    output_gradients,
    relative_error,
    run,
)

each_backend = pytest.mark.parametrize(("definition", "backend"), BACKENDS)
each_definition = pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def tensors_of(inputs):
    return [paddle.to_tensor(x, "float32") for x in inputs.__dict__.values()]


@each_definition
def test_stepwise_backward_has_the_derivatives_of_the_forward_pass(definition):
    """Test the definition itself, with the derivatives along random directions from complex steps."""
    layout = AttentionLayout.from_documents([[3, 1, 4, 2]], document_parents=[[None, 0, 0, None]])
    inputs = definition.random_inputs(layout, (2, 4, 3, 2))
    of_outputs, rng, step = output_gradients(inputs), np.random.default_rng(2), 1e-30
    gradients = definition.backward(inputs, layout, *of_outputs)
    for name, x in inputs.__dict__.items():
        direction = rng.normal(0, 1, x.shape)
        moved = definition.Inputs(**{**inputs.__dict__, name: x + 1j * step * direction})
        pairs = zip(definition.forward(moved, layout)[:2], of_outputs, strict=True)
        derivative = sum((y * of_y).sum().imag for y, of_y in pairs) / step
        np.testing.assert_allclose((getattr(gradients, name) * direction).sum(), derivative, rtol=1e-12, err_msg=name)


@each_definition
@each_layout
@pytest.mark.parametrize("shape", range(4))
def test_reference_in_float64_equals_the_stepwise_definition(definition, layout, shape):
    inputs = definition.random_inputs(layout, definition.SHAPES[shape])
    check(definition, "reference", inputs, layout, 1e-12, **dict.fromkeys(inputs.__dict__, "float64"))


@each_backend
@each_layout
@pytest.mark.parametrize("shape", range(4))
def test_recurrence_equals_the_stepwise_definition(definition, backend, layout, shape):
    check(definition, backend, definition.random_inputs(layout, definition.SHAPES[shape]), layout, 1e-5)


@each_backend
@pytest.mark.parametrize("decay", [-1e-6, -30.0])
def test_recurrence_with_uniform_decays_keeps_float32_precision(definition, backend, decay):
    """Test decays that hardly change the state in a document, and decays whose sum over a chunk reaches -1900."""
    layout = AttentionLayout.from_documents([[700]])
    inputs = definition.random_inputs(layout, (1, 2, 16, 16))
    inputs.decay[:] = decay
    inputs.decay[100:400:3] = -1e-3
    check(definition, backend, inputs, layout, 1e-5)


@each_backend
def test_recurrence_of_packed_documents_has_the_bits_of_the_documents_alone(definition, backend):
    """Test outputs, states and gradients of a document and its branches with other documents before and after them."""
    packed = AttentionLayout.from_documents([[70, 90, 3, 65, 28]], document_parents=[[None, None, 1, 1, None]])
    alone = AttentionLayout.from_documents([[90, 3, 65]], document_parents=[[None, 0, 0]])
    inputs = definition.random_inputs(packed, (2, 12, 20, 32))
    of_o, of_final = output_gradients(inputs)
    part = {name: slice(1, 4) if name == "initial" else slice(70, 228) for name in inputs.__dict__}
    own = definition.Inputs(**{name: x[part[name]] for name, x in inputs.__dict__.items()})
    o, final, found = run(definition, backend, inputs, packed, (of_o, of_final))
    own_o, own_final, own_found = run(definition, backend, own, alone, (of_o[70:228], of_final[1:4]))
    np.testing.assert_array_equal(o[70:228], own_o)
    np.testing.assert_array_equal(final[1:4], own_final)
    for name, x in own_found.__dict__.items():
        np.testing.assert_array_equal(getattr(found, name)[part[name]], x, err_msg=name)


@each_backend
def test_recurrence_does_not_read_nan_of_other_documents(definition, backend):
    layout = AttentionLayout.from_documents([[66, 5, 70]])
    inputs = definition.random_inputs(layout, (2, 12, 5, 3))
    of_o, of_final = output_gradients(inputs)
    o, final, gradients = run(definition, backend, inputs, layout, (of_o, of_final))
    *of_positions, initial = inputs.__dict__.values()
    for x in (*of_positions, of_o):
        x[66:71] = np.nan
    initial[1] = of_final[1] = np.nan
    with_nan_o, with_nan_final, with_nan = run(definition, backend, inputs, layout, (of_o, of_final))
    others, other_documents = np.r_[:66, 71:141], [0, 2]
    np.testing.assert_array_equal(with_nan_o[others], o[others])
    np.testing.assert_array_equal(with_nan_final[other_documents], final[other_documents])
    for name, x in gradients.__dict__.items():
        rows = other_documents if name == "initial" else others
        np.testing.assert_array_equal(getattr(with_nan, name)[rows], x[rows], name)


@needs_cpp
@each_definition
@each_layout
def test_recurrence_in_cpp_with_more_threads_has_the_bits_of_one_thread(definition, layout, cpp_threads):
    inputs, results = definition.random_inputs(layout, (2, 22, 20, 33)), []
    for threads in (1, 2, 3):
        cpp_threads(threads)
        *outputs, gradients = run(definition, "cpp", inputs, layout, output_gradients(inputs))
        results.append([*outputs, *gradients.__dict__.values()])
    for other in results[1:]:
        for x, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(x, expected)


@each_backend
def test_recurrence_reads_bfloat16_and_returns_the_dtype_of_the_values(definition, backend):
    layout = AttentionLayout.from_documents([[5, 70]])
    inputs = definition.random_inputs(layout, (2, 4, 5, 3))
    names = list(inputs.__dict__)[:3]
    for name in names:  # values that bfloat16 represents
        rounded = paddle.to_tensor(getattr(inputs, name), "bfloat16").astype("float32").numpy()
        setattr(inputs, name, rounded.astype(np.float64))
    check(definition, backend, inputs, layout, 2**-7, **dict.fromkeys(names, "bfloat16"))
    tensors = tensors_of(inputs)
    tensors[:3] = (x.astype("bfloat16") for x in tensors[:3])
    o, final = definition.op.choose(tensors[2], backend)(*tensors[:-1], layout)
    assert (o.dtype, final.dtype) == (paddle.bfloat16, paddle.float32)


@each_backend
def test_recurrence_without_initial_states_starts_from_zeros(definition, backend):
    layout = AttentionLayout.from_documents([[5, 1, 70]])
    inputs = definition.random_inputs(layout, (2, 4, 5, 3))
    inputs.initial[:] = 0
    *tensors, initial = tensors_of(inputs)
    op = definition.op.choose(tensors[2], backend)
    for found, expected in zip(op(*tensors, layout), op(*tensors, layout, initial), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@each_backend
@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (1, 6, 20, 70)])
def test_recurrence_continued_from_a_state_equals_one_pass(definition, backend, shape):
    """Test two rows with a prefix followed by single positions, as in decoding."""
    whole = AttentionLayout.from_documents([[80], [80]])
    inputs = definition.random_inputs(whole, shape)
    *tensors, state = tensors_of(inputs)
    op = definition.op.choose(tensors[2], backend)
    expected, expected_state = op(*tensors, whole, state)
    outputs = []
    for start, end in [(0, 77), (77, 78), (78, 79), (79, 80)]:
        part = AttentionLayout.from_documents([[end - start]] * 2)
        before = state.numpy().copy()
        rows = [x.reshape([2, 80, *x.shape[1:]])[:, start:end].flatten(0, 1) for x in tensors]
        o, after = op(*rows, part, state)
        np.testing.assert_array_equal(state.numpy(), before)  # other rows of a cache may refer to the state
        outputs.append(o.reshape([2, end - start, *o.shape[1:]]))
        state = after
    assert relative_error(paddle.concat(outputs, 1).flatten(0, 1).numpy(), expected.numpy()) < 1e-5
    assert relative_error(state.numpy(), expected_state.numpy()) < 1e-5


@needs_cpp
@each_definition
@pytest.mark.parametrize("lengths", [[[1], [1]], [[66, 1]]])
def test_recurrence_in_cpp_overwrites_states_only_without_gradients(definition, lengths):
    layout = AttentionLayout.from_documents(lengths)
    *tensors, state = tensors_of(definition.random_inputs(layout, (2, 6, 5, 20)))
    op, before = definition.op.choose(state, "cpp"), state.numpy().copy()
    o, final = op(*tensors, layout, state)
    np.testing.assert_array_equal(state.numpy(), before)
    state.stop_gradient = False
    for each in (op(*tensors, layout, state), op(*tensors, layout, state, overwrites=True)):
        np.testing.assert_array_equal(each[1].numpy(), final.numpy())
        np.testing.assert_array_equal(state.numpy(), before)
    with paddle.no_grad():
        own_o, own_final = op(*tensors, layout, state, overwrites=True)
    np.testing.assert_array_equal(own_o.numpy(), o.numpy())
    np.testing.assert_array_equal(own_final.numpy(), final.numpy())
    assert own_final.data_ptr() == state.data_ptr()


@each_backend
def test_recurrence_with_a_gradient_of_one_input_equals_the_full_gradient(definition, backend):
    layout = AttentionLayout.from_documents([[5, 70]])
    inputs = definition.random_inputs(layout, (2, 4, 5, 3))
    of_o, of_final = output_gradients(inputs)
    expected = run(definition, backend, inputs, layout, (of_o, np.zeros_like(of_final)))[2]
    tensors = tensors_of(inputs)
    for tensor, name in zip(tensors, inputs.__dict__, strict=True):
        tensor.stop_gradient = False
        *before, initial = tensors
        o, _ = definition.op.choose(tensors[2], backend)(*before, layout, initial)
        (o * paddle.to_tensor(of_o, "float32")).sum().backward()
        assert tensor.grad is not None
        np.testing.assert_array_equal(tensor.grad.numpy(), getattr(expected, name), err_msg=name)
        tensor.stop_gradient = True
