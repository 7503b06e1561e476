"""Triton kernels of the recurrences in the interpreter, against their stepwise definitions in double precision."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.dispatch import anywhere
from paddlenlp_ext.ops.gated_delta_rule import triton_recurrence as module
from paddlenlp_ext.ops.gated_delta_rule.kernels.chunk_lists import chunk_lists
from tests.common.arrays import normal
from tests.common.recurrences import DEFINITIONS, check, output_gradients, run
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

FOLDER = "paddlenlp_ext.ops.gated_delta_rule.kernels"
UNITS, UPDATES, STATES, OUTPUTS = (
    f"{name}_kernel" for name in ("unit_vectors", "delta_rule_updates", "recurrence_states", "recurrence_outputs")
)
OF_STATES, OF_VALUES, OF_KEYS = (f"recurrence_{name}_gradients_kernel" for name in ("state", "value", "key"))
LAYOUTS = {
    "documents of 1": AttentionLayout.from_documents([[1], [1]]),
    "chunk borders": AttentionLayout.from_documents([[16, 17]]),
    "branches": AttentionLayout.from_documents([[18, 5, 1, 3, 2]], document_parents=[[None, 0, 0, None, 3]]),
}
"""Layouts for chunks of 16 positions."""
WITH_KERNELS = {name: definition for name, definition in DEFINITIONS.items() if "triton" in definition.op.backends}
each_definition = pytest.mark.parametrize("definition", WITH_KERNELS.values(), ids=WITH_KERNELS)


@pytest.fixture(scope="module")
def kernels():
    with ExitStack() as stack:
        for name in ("passes", "unit_vectors"):
            stack.enter_context(interpreted(f"{FOLDER}.{name}"))
        yield


@pytest.fixture
def launched(kernels, monkeypatch):
    """Let the ops run the Triton backend on the CPU, in tiles of 16 columns; return the launches."""
    from paddlenlp_ext.ops.gated_delta_rule.kernels import backward, forward, unit_vectors, updates

    sizes = {"VALUES": 16, "num_warps": 4, "num_stages": 1}
    for table in (
        *(updates.SIZES, forward.STATE_SIZES, forward.OUTPUT_SIZES),
        *(backward.STATE_SIZES, backward.VALUE_SIZES, backward.KEY_SIZES),
    ):
        monkeypatch.setattr(table, "fixed", sizes)
    monkeypatch.setattr(unit_vectors.SIZES, "fixed", {"ROWS": 32, "num_warps": 4})
    for definition in WITH_KERNELS.values():
        implementation, _ = definition.op._backends["triton"]
        monkeypatch.setitem(definition.op._backends, "triton", (implementation, anywhere))
        monkeypatch.setattr(definition.op, "_chosen", {})
    recorder = Recorder()
    monkeypatch.setattr(module, "launch", recorder)
    return recorder


@pytest.fixture
def short_chunks(monkeypatch):
    """Use chunks of 16 positions."""
    inputs = importlib.import_module(f"{FOLDER}.inputs")
    monkeypatch.setattr(inputs, "chunk_size", lambda element_size, longest: 16)


@each_definition
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_recurrence_in_triton_equals_the_stepwise_definition(launched, short_chunks, definition, layout):
    check(definition, "triton", definition.random_inputs(layout, (1, 1, 5, 3)), layout, 1e-5)


@each_definition
def test_recurrence_in_triton_with_long_chunks_equals_the_stepwise_definition(launched, definition):
    """Test values that need two tiles."""
    layout = AttentionLayout.from_documents([[66, 3]])
    check(definition, "triton", definition.random_inputs(layout, (1, 1, 20, 20)), layout, 1e-5)
    is_delta = definition is DEFINITIONS["gated delta rule"]
    units, updates = ([UNITS] * 2, [UPDATES]) if is_delta else ([], [])
    states = [*units, *updates, STATES]
    assert launched.names == [*states, OUTPUTS, *states, OF_STATES, OF_VALUES, OF_KEYS, *units]


@each_definition
def test_recurrence_in_triton_sums_the_gradients_of_the_heads_of_a_group(launched, short_chunks, definition):
    """Test two groups of heads, and a group of five heads, which two programs sum."""
    layout = AttentionLayout.from_documents([[7]])
    check(definition, "triton", definition.random_inputs(layout, (2, 4, 5, 3)), layout, 1e-5)
    launched.clear()
    check(definition, "triton", definition.random_inputs(layout, (1, 5, 5, 3)), layout, 1e-5)
    (of_keys,) = (each for each in launched if each.name == OF_KEYS)
    assert of_keys.grid == (1, 1, 2)


@each_definition
def test_recurrence_in_triton_with_large_decays_keeps_float32_precision(launched, definition):
    """Test decays whose sum over a chunk reaches -1900, beside small ones."""
    layout = AttentionLayout.from_documents([[130]])
    inputs = definition.random_inputs(layout, (1, 1, 16, 16))
    inputs.decay[:] = -30
    inputs.decay[10:100:3] = inputs.decay[11:100:3] = -1e-3
    check(definition, "triton", inputs, layout, 1e-5)


def test_gated_delta_rule_in_triton_with_equal_keys_solves_a_stiff_system(launched):
    """Test keys and strengths for which the powers of A reach 1e18, so that sums of powers lose all digits."""
    layout, definition = AttentionLayout.from_documents([[64]]), DEFINITIONS["gated delta rule"]
    inputs = definition.random_inputs(layout, (1, 1, 16, 16))
    inputs.k[:], inputs.beta[:], inputs.decay[:] = inputs.k[:1], 2.0, -1e-3
    check(definition, "triton", inputs, layout, 2e-4)


@each_definition
def test_recurrence_in_triton_of_packed_documents_has_the_bits_of_the_documents_alone(
    launched, short_chunks, definition
):
    """Test a document and its branches between neighbors whose inputs and gradients are NaN."""
    packed = AttentionLayout.from_documents([[7, 20, 3, 17, 5]], document_parents=[[None, None, 1, 1, None]])
    alone = AttentionLayout.from_documents([[20, 3, 17]], document_parents=[[None, 0, 0]])
    inputs = definition.random_inputs(packed, (1, 1, 5, 3))
    of_o, of_final = output_gradients(inputs)
    *of_positions, initial = inputs.__dict__.values()
    for x in (*of_positions, of_o):
        x[:7] = x[47:] = np.nan
    for x in (initial, of_final):
        x[0] = x[4] = np.nan
    part = {name: slice(1, 4) if name == "initial" else slice(7, 47) for name in inputs.__dict__}
    own = definition.Inputs(**{name: x[part[name]] for name, x in inputs.__dict__.items()})
    o, final, found = run(definition, "triton", inputs, packed, (of_o, of_final))
    own_o, own_final, own_found = run(definition, "triton", own, alone, (of_o[7:47], of_final[1:4]))
    np.testing.assert_array_equal(o[7:47], own_o)
    np.testing.assert_array_equal(final[1:4], own_final)
    for name, x in own_found.__dict__.items():
        assert np.isfinite(x).all(), name
        np.testing.assert_array_equal(getattr(found, name)[part[name]], x, err_msg=name)


@each_definition
def test_recurrence_in_triton_in_float16_returns_the_dtype_of_the_values(launched, short_chunks, definition):
    """Test queries, keys and values that float16 represents; the states are stored in float16."""
    layout = AttentionLayout.from_documents([[17]])
    inputs = definition.random_inputs(layout, (1, 1, 5, 3))
    names = list(inputs.__dict__)[:3]
    for name in names:
        setattr(inputs, name, getattr(inputs, name).astype(np.float16).astype(np.float64))
    check(definition, "triton", inputs, layout, 4e-3, **dict.fromkeys(names, "float16"))
    for own_names, dtype in ((names, paddle.float16), (names[:2], paddle.float32)):
        dtypes = dict.fromkeys(own_names, "float16")
        *tensors, _ = (paddle.to_tensor(x, dtypes.get(name, "float32")) for name, x in inputs.__dict__.items())
        o, final = definition.op.choose(tensors[2], "triton")(*tensors, layout)
        assert (o.dtype, final.dtype) == (dtype, paddle.float32)


@each_definition
def test_recurrence_in_triton_without_initial_states_starts_from_zeros(launched, short_chunks, definition):
    layout = LAYOUTS["branches"]
    inputs = definition.random_inputs(layout, (1, 1, 5, 3))
    inputs.initial[:] = 0
    *tensors, initial = (paddle.to_tensor(x, "float32") for x in inputs.__dict__.values())
    op = definition.op.choose(tensors[2], "triton")
    for found, expected in zip(op(*tensors, layout), op(*tensors, layout, initial), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@each_definition
def test_recurrence_in_triton_with_a_gradient_of_one_input_equals_the_full_gradient(launched, short_chunks, definition):
    layout = AttentionLayout.from_documents([[17]])
    inputs = definition.random_inputs(layout, (1, 1, 5, 3))
    of_o, of_final = output_gradients(inputs)
    expected = run(definition, "triton", inputs, layout, (of_o, np.zeros_like(of_final)))[2]
    tensors = [paddle.to_tensor(x, "float32") for x in inputs.__dict__.values()]
    for tensor, name in list(zip(tensors, inputs.__dict__, strict=True))[1::2]:
        tensor.stop_gradient = False
        *before, initial = tensors
        o, _ = definition.op.choose(tensors[2], "triton")(*before, layout, initial)
        (o * paddle.to_tensor(of_o, "float32")).sum().backward()
        assert tensor.grad is not None
        np.testing.assert_array_equal(tensor.grad.numpy(), getattr(expected, name), err_msg=name)
        tensor.stop_gradient = True


@each_definition
def test_recurrence_in_triton_leaves_wide_keys_to_the_reference(launched, definition):
    layout = AttentionLayout.from_documents([[3]])
    check(definition, "triton", definition.random_inputs(layout, (1, 1, 130, 3)), layout, 1e-5)
    assert launched == []


def test_unit_vectors_equal_the_formula(launched):
    x, gradient = normal(1, 37, 2, 20), normal(2, 37, 2, 20)
    tensor, out = paddle.to_tensor(x), paddle.empty([37, 2, 20])
    from paddlenlp_ext.ops.gated_delta_rule.kernels.unit_vectors import launch_unit_vectors

    norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-3)
    launch_unit_vectors(launched, tensor, out, 0.5, 1e-3)
    np.testing.assert_allclose(out.numpy(), 0.5 * x / norm, atol=1e-6)
    launch_unit_vectors(launched, tensor, out, 0.5, 1e-3, paddle.to_tensor(gradient))
    expected = 0.5 * (gradient / norm - x * (x * gradient).sum(-1, keepdims=True) / norm**3)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-6)


def test_chunk_lists_have_the_chunks_of_each_document_in_order():
    layout = AttentionLayout.from_documents([[18, 5, 1, 20, 3]], document_parents=[[None, 0, 0, None, 3]])
    lists = chunk_lists(*layout.documents(), layout.parents(), 16)
    assert lists.chunks.tolist() == [[0, 16], [16, 18], [18, 23], [23, 24], [24, 40], [40, 44], [44, 47]]
    assert lists.documents.tolist() == [[0, 2, -1, 3], [2, 3, 0, 3], [3, 4, 0, 3], [4, 6, -1, 5], [6, 7, 3, 5]]
    assert (lists.roots.tolist(), lists.branches.tolist()) == ([0, 3], [1, 2, 4])


@pytest.mark.parametrize(("element_size", "longest", "expected"), [(2, 70, 64), (4, 70, 32), (2, 1, 16)])
def test_chunks_are_shorter_in_float32_and_for_single_positions(kernels, element_size, longest, expected):
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import chunk_size

    assert chunk_size(element_size, longest) == expected


def test_recurrence_launches_for_a_4b_model_have_programs_for_documents_and_chunks(launched):
    from paddlenlp_ext.ops.gated_delta_rule.kernels import backward, forward
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem

    launch = Recorder(runs=False)
    lists = chunk_lists(np.array([0, 4096]), np.array([4096, 4096]), np.array([-1, -1]), 64)
    keys, values = (SimpleNamespace(shape=[8192, heads, 128], element_size=lambda: 2) for heads in (16, 32))
    problem = Problem(keys, keys, values, None, None, None, lists)
    forward.launch_states(launch, problem, values, None, None, None)
    forward.launch_outputs(launch, problem, values, None, None)
    backward.launch_state_gradients(launch, problem, None, *[None] * 5)
    backward.launch_value_gradients(launch, problem, [None] * 6, [None] * 5)
    backward.launch_key_gradients(launch, problem, [None] * 7, [None] * 2)
    assert [call.grid for call in launch] == [(8, 32, 2), (128, 32), (8, 32, 2), (128, 32), (128, 16, 1)]


@each_definition
def test_triton_backend_of_recurrences_on_cpu_raises_value_error(definition):
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        definition.op.choose(paddle.ones([1, 4]), "triton")
