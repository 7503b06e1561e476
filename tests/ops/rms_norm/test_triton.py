"""Triton kernels of the RMS norm in the interpreter, against the formula in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import rms_norm as module
from paddlenlp_ext.ops.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

EPSILON = 1e-3
FORWARD, BACKWARD, SUMS = "rms_norm_forward_kernel", "rms_norm_backward_kernel", "column_sums_kernel"


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.rms_norm.kernels") as found:
        yield found


def set_sizes(kernels, monkeypatch, **sizes: int) -> None:
    """Replace the sizes of the tables."""
    forward = {name: size for name, size in sizes.items() if name != "PROGRAMS"}
    monkeypatch.setattr(kernels.FORWARD_SIZES, "fixed", forward)
    monkeypatch.setattr(kernels.BACKWARD_SIZES, "fixed", sizes)


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the launches in the interpreter, with at most two partial sums of weight gradients; return them."""
    recorder = Recorder()
    monkeypatch.setattr("paddlenlp_ext.ops.rms_norm.triton.launch", recorder)
    set_sizes(kernels, monkeypatch, ROWS=32, PROGRAMS=2, num_warps=4)
    return recorder


def formula(x: np.ndarray, weight: np.ndarray, gradient: np.ndarray, offset: float) -> list[np.ndarray]:
    """Return the norm and the gradients of x and of the weight, in float64."""
    x, scale = x.astype(np.float64), weight.astype(np.float64) + offset
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    scaled = gradient * scale
    x_gradient = scaled / rms - x * (scaled * x).mean(-1, keepdims=True) / rms**3
    return [x / rms * scale, x_gradient, (gradient * x / rms).reshape(-1, x.shape[-1]).sum(0)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (67, 33), (3, 2500)])
def test_rms_norm_triton_matches_the_formula(launched, shape, offset):
    x, weight, gradient = normal(1, *shape), normal(2, shape[-1]), normal(3, *shape)
    actual = run_both_ways(lambda x, w: rms_norm_triton(x, w, EPSILON, offset), [x, weight], gradient)
    assert_all_close(actual, formula(x, weight, gradient, offset), atol=2e-5)
    assert launched.names == [FORWARD, BACKWARD, SUMS]


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 1, 8), (67, 33)])
def test_add_rms_norm_triton_matches_the_formula(launched, shape, frozen):
    x, addend, weight = normal(1, *shape), normal(2, *shape), normal(3, shape[-1])
    total_gradient, gradient = normal(4, *shape), normal(5, *shape)
    inputs = [paddle.to_tensor(array, stop_gradient=index == frozen) for index, array in enumerate((x, addend, weight))]
    total, out = add_rms_norm_triton(*inputs, EPSILON, 1.0)
    # The sum is used twice, so Paddle accumulates its gradient in place.
    loss = (out * paddle.to_tensor(gradient)).sum() + (total * paddle.to_tensor(total_gradient)).sum()
    (loss + (inputs[0] * 2.0).sum()).backward()
    normed, of_total, of_weight = formula(x + addend, weight, gradient, 1.0)
    expected = [of_total + total_gradient + 2.0, of_total + total_gradient, of_weight]
    expected[frozen] = None
    actual = [total.numpy(), out.numpy(), *(None if each.grad is None else each.grad.numpy() for each in inputs)]
    assert_all_close(actual, [x + addend, normed, *expected], atol=2e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_rms_norm_triton_with_frozen_tensor_returns_no_gradient_for_it(launched, frozen):
    arrays = normal(1, 67, 33), normal(2, 33)
    actual = run_both_ways(lambda x, w: rms_norm_triton(x, w, EPSILON), arrays, normal(3, 67, 33), frozen=[frozen])
    expected = formula(*arrays, normal(3, 67, 33), 0.0)
    expected[1 + frozen] = None
    assert_all_close(actual, expected, atol=2e-5)
    # 67 rows are 3 tiles: a program each with a frozen weight, otherwise two programs
    assert [launch.grid for launch in launched[:2]] == [(3,), (3,) if frozen == 1 else (2,)]
    assert launched.names[2:] == ([] if frozen == 1 else [SUMS])


def test_rms_norm_triton_reads_evenly_spaced_rows_in_place(launched):
    x, weight, gradient = normal(1, 2, 5, 20), normal(2, 7), normal(3, 2, 5, 7)
    actual = run_both_ways(lambda x, w: rms_norm_triton(x[..., 4:11], w, EPSILON), [x, weight], gradient)
    y, x_gradient, weight_gradient = formula(x[..., 4:11], weight, gradient, 0.0)
    padded = np.pad(x_gradient, [(0, 0), (0, 0), (4, 9)])
    assert_all_close(actual, [y, padded, weight_gradient], atol=2e-5)
    assert [launch.arguments["x_stride"] for launch in launched[:2]] == [20, 20]


def test_rms_norm_triton_copies_transposed_rows(launched):
    x, weight = normal(1, 6, 8), paddle.to_tensor(normal(2, 6))
    transposed = paddle.to_tensor(x).transpose([1, 0])
    np.testing.assert_allclose(
        rms_norm_triton(transposed, weight, EPSILON).numpy(),
        formula(x.T, weight.numpy(), np.zeros_like(x.T), 0.0)[0],
        atol=2e-5,
    )
    assert launched[0].arguments["x_stride"] == 6


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_rms_norm_triton_in_half_precision_computes_in_float32(launched, dtype, rounding):
    """Use numbers whose squares float16 cannot store; the interpreter truncates to bfloat16, a GPU rounds."""
    x, weight = (paddle.to_tensor(each).astype(dtype) for each in (400 * normal(1, 9, 33), normal(2, 33)))
    x.stop_gradient = weight.stop_gradient = False
    out = rms_norm_triton(x, weight, EPSILON)
    out.backward(paddle.to_tensor(normal(3, 9, 33)).astype(dtype))
    arrays = [each.astype("float32").numpy() for each in (x, weight, paddle.to_tensor(normal(3, 9, 33)).astype(dtype))]
    for actual, expected in zip((out, x.grad, weight.grad), formula(*arrays, 0.0), strict=True):
        assert actual.dtype == x.dtype
        np.testing.assert_allclose(actual.astype("float32").numpy(), expected, rtol=rounding, atol=2e-6)


def test_add_rms_norm_triton_in_bfloat16_normalizes_the_rounded_sum(launched):
    x, addend = (paddle.to_tensor(normal(seed, 5, 33)).astype("bfloat16") for seed in (1, 2))
    weight = paddle.ones([33])
    total, out = add_rms_norm_triton(x, addend, weight, EPSILON)
    alone = rms_norm_triton(total, weight, EPSILON)
    np.testing.assert_array_equal(out.astype("float32").numpy(), alone.astype("float32").numpy())


def test_add_rms_norm_triton_of_float32_and_a_product_under_autocast_matches_the_formula(launched):
    """Hidden states are float32 under autocast, and what a linear layer adds to them is in half precision."""
    x, weight, addend = normal(1, 9, 33), normal(3, 33), normal(2, 9, 33).astype(np.float16)
    total_gradient, gradient = normal(4, 9, 33), normal(5, 9, 33)
    inputs = [paddle.to_tensor(array, stop_gradient=False) for array in (x, addend, weight)]
    total, out = add_rms_norm_triton(*inputs, EPSILON)
    ((out * paddle.to_tensor(gradient)).sum() + (total * paddle.to_tensor(total_gradient)).sum()).backward()
    normed, of_total, of_weight = formula(x + addend, weight, gradient, 0.0)
    of_total += total_gradient
    assert [each.dtype for each in (total, out)] == [paddle.float32] * 2
    assert [each.grad.dtype for each in inputs] == [each.dtype for each in inputs]
    actual = [total.numpy(), out.numpy(), inputs[0].grad.numpy(), inputs[2].grad.numpy()]
    assert_all_close(actual, [x + addend, normed, of_total, of_weight], atol=2e-5)
    np.testing.assert_allclose(inputs[1].grad.astype("float32").numpy(), of_total, rtol=2.0**-10, atol=1e-6)


def test_add_rms_norm_triton_refuses_to_round_the_addend(launched):
    with pytest.raises(AssertionError, match="float32 would be rounded to"):
        add_rms_norm_triton(paddle.ones([2, 3], "float16"), paddle.ones([2, 3]), paddle.ones([3]), EPSILON)


def test_rms_norm_launches_for_an_8b_model_have_grids_of_tiles(kernels, monkeypatch):
    set_sizes(kernels, monkeypatch, ROWS=2, PROGRAMS=256, num_warps=8)
    launch = Recorder(runs=False)
    x, weight = SimpleNamespace(shape=[2, 4096, 4096]), SimpleNamespace(shape=[4096])
    assert kernels.num_partials(x) == 256
    kernels.launch_forward(launch, x, 4096, weight, x, 1e-6, 0.0)
    kernels.launch_backward(launch, x, x, 4096, weight, x, 1e-6, 0.0)
    kernels.launch_backward(launch, x, x, 4096, weight, x, 1e-6, 0.0, x, SimpleNamespace(shape=[256, 4096]))
    sizes = {"num_rows": 8192, "size": 4096, "ROWS": 2, "COLUMNS": 4096, "num_warps": 8}
    for call, grid, special in zip(
        launch,
        (4096, 4096, 256),
        (
            {"ADDS": False},
            {"ADDS": False, "SUMS": False, "num_tiles": 1},
            {"ADDS": True, "SUMS": True, "num_tiles": 16},
        ),
        strict=True,
    ):
        assert call.grid == (grid,)
        assert {**sizes, **special}.items() <= call.arguments.items()


@pytest.mark.parametrize("size", [1, 64, 65, 4097, 65536])
def test_rms_norm_programs_cover_whole_rows(kernels, size):
    launch, x = Recorder(runs=False), paddle.empty([3, size])
    kernels.launch_forward(launch, x, size, paddle.empty([size]), x, 1e-6, 0.0)
    columns = launch[0].arguments["COLUMNS"]
    assert size <= columns < 2 * size and columns & (columns - 1) == 0


def test_rms_norm_of_longer_rows_is_refused(kernels):
    with pytest.raises(ValueError, match="rows of 65537 elements; the Triton kernels support at most 65536"):
        kernels.num_partials(SimpleNamespace(shape=[3, 65537]))


def test_column_sums_of_some_rows_match_numpy():
    with interpreted("paddlenlp_ext.ops.triton_utils.column_sums") as sums:
        partials, out = paddle.to_tensor(normal(1, 200, 45)), paddle.full([45], 99.0)
        sums.launch_column_sums(Recorder(), partials, out, 3, 150)
    np.testing.assert_allclose(out.numpy(), partials.numpy()[3:153].astype(np.float64).sum(0), atol=1e-5)


def test_triton_backend_of_rms_norm_on_cpu_raises_value_error():
    for op in (module.rms_norm_op, module.add_rms_norm_op):
        with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
            op.choose(paddle.ones([1, 4]), "triton")
