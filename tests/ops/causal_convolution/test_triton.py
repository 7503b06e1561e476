"""Triton kernels of the causal convolution in the interpreter, against the formula in double precision."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.causal_convolution import causal_convolution_op, document_taps
from paddlenlp_ext.ops.causal_convolution.readers import readers_of
from paddlenlp_ext.ops.causal_convolution.triton import causal_convolution_triton
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.ops.causal_convolution.formula import formula
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

FORWARD, INPUTS, WEIGHTS, SUMS = (
    "causal_convolution_forward_kernel",
    "causal_convolution_input_gradient_kernel",
    "causal_convolution_weight_gradient_kernel",
    "column_sums_kernel",
)
LAYOUTS = {
    "documents": AttentionLayout.from_documents([[4, 1, 9, 2], [8, 8]]),
    "branches": AttentionLayout.from_documents(
        [[5, 1, 2, 4], [1, 6, 2, 3]], document_parents=[[None, 0, 0, None], [None, None, 1, 1]]
    ),
}


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.causal_convolution.kernels") as found:
        yield found


def set_sizes(kernels, monkeypatch, **sizes: int) -> None:
    """Replace the sizes of the tables."""
    own = {name: size for name, size in sizes.items() if name != "PROGRAMS"}
    for table in (kernels.FORWARD_SIZES, kernels.INPUT_GRADIENT_SIZES):
        monkeypatch.setattr(table, "fixed", own)
    monkeypatch.setattr(kernels.WEIGHT_GRADIENT_SIZES, "fixed", sizes)


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the launches in the interpreter, with at most two partial sums of weight gradients; return them."""
    recorder = Recorder()
    monkeypatch.setattr("paddlenlp_ext.ops.causal_convolution.triton.launch", recorder)
    set_sizes(kernels, monkeypatch, ROWS=8, COLUMNS=16, PROGRAMS=2, num_warps=4)
    return recorder


def inputs_of(taps, channels: int) -> list[np.ndarray]:
    """Return random x, weight, bias and gradient of y."""
    num_outputs, num_taps = taps.rows.shape
    shapes = (taps.num_rows, channels), (channels, num_taps), (channels,), (num_outputs, channels)
    return [normal(seed, *shape) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("num_taps", "channels", "has_windows"), [(1, 5, False), (3, 16, True), (4, 37, True)])
def test_causal_convolution_triton_matches_the_formula(launched, layout, num_taps, channels, has_windows):
    taps = document_taps(layout, num_taps, has_windows)
    *inputs, gradient = inputs_of(taps, channels)
    actual = run_both_ways(lambda x, weight, bias: causal_convolution_triton(x, weight, taps, bias), inputs, gradient)
    assert_all_close(actual, formula(*inputs, taps.rows, gradient), atol=1e-5)
    assert launched.names == [FORWARD, INPUTS, WEIGHTS, SUMS]


@pytest.mark.parametrize(
    ("frozen", "launches"), [([0], [WEIGHTS, SUMS]), ([1, 2], [INPUTS]), ([1], [INPUTS, WEIGHTS, SUMS]), ([2], None)]
)
def test_causal_convolution_triton_returns_no_gradient_for_frozen_tensors(launched, frozen, launches):
    taps = document_taps(LAYOUTS["branches"], 3)
    *inputs, gradient = inputs_of(taps, 20)
    expected = formula(*inputs, taps.rows, gradient)
    for index in frozen:
        expected[1 + index] = None
    actual = run_both_ways(
        lambda x, weight, bias: causal_convolution_triton(x, weight, taps, bias), inputs, gradient, frozen
    )
    assert_all_close(actual, expected, atol=1e-5)
    assert launched.names[1:] == (launches or [INPUTS, WEIGHTS, SUMS])


def test_causal_convolution_triton_without_bias_matches_the_formula(launched):
    taps = document_taps(LAYOUTS["documents"], 4)
    x, weight, bias, gradient = inputs_of(taps, 20)
    actual = run_both_ways(lambda x, weight: causal_convolution_triton(x, weight, taps), [x, weight], gradient)
    assert_all_close(actual, formula(x, weight, 0 * bias, taps.rows, gradient)[:3], atol=1e-5)


def test_causal_convolution_triton_of_packed_documents_has_the_bits_of_the_documents_alone(launched):
    """Test a document and its branch between neighbors whose inputs and gradients are NaN."""
    packed = AttentionLayout.from_documents([[3, 1, 9, 2, 5]], document_parents=[[None, None, None, 2, None]])
    alone = AttentionLayout.from_documents([[9, 2]], document_parents=[[None, 0]])
    x, weight, _, gradient = inputs_of(document_taps(packed, 4), 20)
    x[:4] = x[15:] = gradient[:4] = gradient[15:] = np.nan
    found = []
    for layout, part in ((packed, slice(0, 20)), (alone, slice(4, 15))):
        taps = document_taps(layout, 4)
        run = functools.partial(causal_convolution_triton, weight_DL=paddle.to_tensor(weight), taps=taps)
        found.append(run_both_ways(run, [x[part]], gradient[part]))
    for of_packed, of_alone in zip(*found, strict=True):
        np.testing.assert_array_equal(of_packed[4:15], of_alone)


def test_causal_convolution_triton_in_float16_computes_in_float32(launched):
    taps = document_taps(LAYOUTS["branches"], 3)
    *inputs, gradient = inputs_of(taps, 20)
    tensors = [paddle.to_tensor(each).astype("float16") for each in inputs]
    for each in tensors:
        each.stop_gradient = False
    y = causal_convolution_triton(*tensors[:2], taps, tensors[2])
    of_y = paddle.to_tensor(gradient).astype("float16")
    y.backward(of_y)
    arrays = [each.astype("float32").numpy() for each in (*tensors, of_y)]
    expected = formula(*arrays[:3], taps.rows, arrays[3])
    for actual, correct in zip((y, *(each.grad for each in tensors)), expected, strict=True):
        assert actual.dtype == paddle.float16
        np.testing.assert_allclose(actual.astype("float32").numpy(), correct, rtol=2.0**-10, atol=1e-5)


def test_causal_convolution_launches_for_a_4b_model_have_grids_of_tiles(kernels, monkeypatch):
    set_sizes(kernels, monkeypatch, ROWS=16, COLUMNS=128, PROGRAMS=64, num_warps=4)
    launch = Recorder(runs=False)
    x, weight, taps = (SimpleNamespace(shape=shape) for shape in ([8192, 8192], [4, 8192], [8192, 4]))
    kernels.launch_forward(launch, x, weight, None, taps, x)
    kernels.launch_input_gradient(launch, x, weight, None, None, x)
    kernels.launch_weight_gradient(launch, x, x, taps, SimpleNamespace(shape=[64, 5, 8192]))
    assert kernels.num_parts(x) == 64
    assert [call.grid for call in launch] == [(512, 64), (512, 64), (5, 64, 64)]
    assert launch[2].arguments["num_tiles"] == 8


def test_readers_of_taps_are_the_pairs_of_outputs_and_taps():
    taps = document_taps(LAYOUTS["branches"], 3, has_windows=True)
    starts, entries = readers_of(taps.rows, taps.num_rows)
    for row in range(taps.num_rows):
        pairs = [(int(tap), int(output)) for output, tap in zip(*np.nonzero(taps.rows == row), strict=True)]
        found = [(entry % 3, entry // 3) for entry in entries[starts[row] : starts[row + 1]].tolist()]
        assert found == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))


def test_triton_backend_of_causal_convolution_on_cpu_raises_value_error():
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        causal_convolution_op.choose(paddle.ones([1, 4]), "triton")
