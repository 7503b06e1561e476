"""Triton kernels of the gates in the interpreter, against the formulas in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import gates as module
from paddlenlp_ext.ops.gates.triton import clamped_swiglu_triton, geglu_triton, swiglu_triton
from paddlenlp_ext.ops.recompute_functions import recompute_function
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.ops.gates import test_clamped_swiglu, test_geglu, test_swiglu
from tests.ops.gates.test_clamped_swiglu import ALPHA, LIMIT
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()


def clamped(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    return clamped_swiglu_triton(gate, up, ALPHA, LIMIT, reuse_inputs)


GATES = [
    pytest.param(swiglu_triton, test_swiglu.reference, id="swiglu"),
    pytest.param(geglu_triton, test_geglu.reference, id="geglu"),
    pytest.param(clamped, test_clamped_swiglu.reference, id="clamped"),
]


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.gates.kernels") as found:
        yield found


def set_sizes(kernels, monkeypatch, **sizes: int) -> None:
    """Replace the sizes of the tables."""
    for table in (kernels.FORWARD_SIZES, kernels.BACKWARD_SIZES):
        monkeypatch.setattr(table, "fixed", sizes)


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the launches in the interpreter, with at most 32 elements a program; return them."""
    recorder = Recorder()
    monkeypatch.setattr("paddlenlp_ext.ops.gates.triton.launch", recorder)
    set_sizes(kernels, monkeypatch, COLUMNS=32, num_warps=1)
    return recorder


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (5, 101)])
@pytest.mark.parametrize(("gate_op", "reference"), GATES)
def test_gate_triton_matches_the_formula(launched, gate_op, reference, shape):
    gate, up, gradient = 4 * normal(1, *shape), 2 * normal(2, *shape), normal(3, *shape)
    with np.errstate(over="ignore"):  # of the elements beyond a row
        actual = run_both_ways(gate_op, [gate, up], gradient)
    assert_all_close(actual, reference(gate, up, gradient), atol=2e-5)
    assert launched.names == ["gate_forward_kernel", "gate_backward_kernel"]


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize(("gate_op", "reference"), GATES)
def test_gate_triton_with_frozen_input_returns_no_gradient_for_it(launched, gate_op, reference, frozen):
    arrays = normal(1, 3, 7), normal(2, 3, 7), normal(3, 3, 7)
    actual = run_both_ways(gate_op, arrays[:2], arrays[2], frozen=[frozen])
    expected = reference(*arrays)
    expected[1 + frozen] = None
    assert_all_close(actual, expected, atol=2e-5)


@pytest.mark.parametrize(("gate_op", "reference"), GATES)
def test_gate_triton_of_a_joint_projection_writes_gradients_over_its_halves(launched, gate_op, reference):
    joint, gradient = normal(1, 2, 2, 80), normal(2, 2, 2, 40)
    leaf = paddle.to_tensor(joint, stop_gradient=False)
    both = leaf * 1.0
    gate, up = both[..., :40], both[..., 40:]
    out = gate_op(gate, up, reuse_inputs=True)
    out.backward(paddle.to_tensor(gradient))
    expected = reference(joint[..., :40], joint[..., 40:], gradient)
    assert_all_close([out.numpy(), leaf.grad.numpy()], [expected[0], np.concatenate(expected[1:], -1)], atol=2e-5)
    np.testing.assert_allclose(both.numpy(), np.concatenate(expected[1:], -1), atol=2e-5)
    arguments = launched[1].arguments
    assert [arguments[f"{name}_stride"] for name in ("gradient", "gate", "up", "gate_gradient")] == [40, 80, 80, 80]
    assert arguments["gate"].data_ptr() == arguments["gate_gradient"].data_ptr()


def test_gate_triton_without_reuse_keeps_its_inputs(launched):
    gate, up = (paddle.to_tensor(normal(seed, 3, 7), stop_gradient=False) for seed in (1, 2))
    swiglu_triton(gate, up).sum().backward()
    np.testing.assert_array_equal(gate.numpy(), normal(1, 3, 7))
    np.testing.assert_array_equal(up.numpy(), normal(2, 3, 7))


def test_gate_triton_with_reuse_refuses_a_second_backward_pass(launched):
    leaves = [paddle.to_tensor(normal(seed, 3, 7), stop_gradient=False) for seed in (1, 2)]
    out = swiglu_triton(*(each * 1.0 for each in leaves), reuse_inputs=True)
    paddle.grad(out, leaves, retain_graph=True)
    with pytest.raises(Exception, match="second backward pass through a gate"):
        paddle.grad(out, leaves)


def test_gate_triton_product_can_be_recomputed(launched):
    gate, up = (paddle.to_tensor(normal(seed, 3, 7), stop_gradient=False) for seed in (1, 2))
    out = swiglu_triton(gate, up)
    make = recompute_function(out)
    assert make is not None
    np.testing.assert_array_equal(make().numpy(), out.numpy())


@pytest.mark.parametrize("far", [-1e6, -104.0, -30.0, 30.0, 1e6])
@pytest.mark.parametrize("gate_op", [swiglu_triton, geglu_triton])
def test_gate_triton_with_large_gate_is_zero_or_its_input(launched, gate_op, far):
    """Check values and gradients where e^-x and x^3 leave the float range."""
    with np.errstate(over="ignore"):
        out, gate_gradient, up_gradient = run_both_ways(
            gate_op, [np.full([17], far, np.float32), np.ones([17], np.float32)], np.ones([17], np.float32)
        )
    expected = max(far, 0.0)
    for values, correct in ((out, expected), (up_gradient, expected), (gate_gradient, float(far > 0))):
        np.testing.assert_allclose(values, correct, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_gate_triton_in_half_precision_rounds_once(launched, dtype, rounding):
    """Compare with the formula of the rounded inputs; the interpreter truncates to bfloat16, a GPU rounds."""
    arrays = [paddle.to_tensor(normal(seed, 3, 33)).astype(dtype) for seed in (1, 2, 3)]
    gate, up = (each.detach() for each in arrays[:2])
    gate.stop_gradient = up.stop_gradient = False
    out = geglu_triton(gate, up)
    out.backward(arrays[2])
    expected = test_geglu.reference(*(each.astype("float32").numpy() for each in arrays))
    for actual, correct in zip((out, gate.grad, up.grad), expected, strict=True):
        assert actual.dtype == gate.dtype
        np.testing.assert_allclose(actual.astype("float32").numpy(), correct, rtol=rounding, atol=1e-5)


def test_gate_launches_for_an_8b_model_have_a_grid_of_rows_and_columns(kernels, monkeypatch):
    set_sizes(kernels, monkeypatch, COLUMNS=2048, num_warps=4)
    launch = Recorder(runs=False)
    rows = kernels.Rows(SimpleNamespace(shape=[2, 4096, 14336]), 14336)
    joint = kernels.Rows(rows.tensor, 28672)
    kernels.launch_forward(launch, joint, joint, rows, "silu")
    kernels.launch_backward(launch, rows, joint, joint, joint, joint, "gelu")
    assert [call.grid for call in launch] == [(8192, 7), (8192, 7)]
    for call, activation in zip(launch, ("silu", "gelu"), strict=True):
        expected = {"size": 14336, "gate_stride": 28672, "COLUMNS": 2048, "num_warps": 4, "ACTIVATION": activation}
        assert expected.items() <= call.arguments.items()


def test_triton_backend_of_gates_on_cpu_raises_value_error():
    for op in (module.swiglu_op, module.geglu_op, module.clamped_swiglu_op):
        with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
            op.choose(paddle.ones([1, 4]), "triton")
