"""Triton kernels of grouped products in the interpreter, against the formula in double precision."""

from __future__ import annotations

import importlib
import importlib.util
import math
import subprocess
import sys

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import grouped_linear as module
from paddlenlp_ext.ops.grouped_linear import triton as grouped_triton
from paddlenlp_ext.ops.grouped_linear.triton import GroupedTriton, row_tiles
from tests.common.arrays import normal
from tests.common.gpu import pretend_autocast
from tests.common.scripts import script_environment
from tests.ops.grouped_linear.test_grouped_linear import expected, run
from tests.ops.host_array import HostArray

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)

COUNTS = [[3, 0, 11, 1], [0, 0, 0], [0, 2], [40, 1, 0, 19], [16, 33]]


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads the variable when a kernel is defined, for its own kernels when it is first imported.
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module("paddlenlp_ext.ops.grouped_linear.kernels")


@pytest.fixture
def launched(kernels, monkeypatch):
    """Use the backend on the CPU, with small tiles; return name, grid and arguments of each launch."""
    calls = []

    def launch(kernel, grid, *arguments, **constants):
        constants.pop("num_warps")
        wrapped = [HostArray(value) if isinstance(value, paddle.Tensor) else value for value in arguments]
        kernel[grid](*wrapped, **constants)
        calls.append((kernel.fn.__name__, grid, arguments, constants))

    monkeypatch.setattr(grouped_triton, "launch", launch)
    product = {"ROWS": 32, "COLUMNS": 32, "TERMS": 16, "BAND": 3, "num_warps": 4}
    monkeypatch.setattr(kernels.PRODUCT_SIZES, "fixed", product)
    weight_gradient = {"OUTPUTS": 32, "INPUTS": 32, "ROWS": 16, "num_warps": 4}
    monkeypatch.setattr(kernels.WEIGHT_GRADIENT_SIZES, "fixed", weight_gradient)
    monkeypatch.setattr(module.grouped_linear_op, "choose", lambda x: GroupedTriton)
    return calls


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("counts", COUNTS)
def test_row_tiles_cover_every_row_once_within_its_group(counts, rows):
    starts = np.concatenate([[0], np.cumsum(counts)])
    tiles = row_tiles(starts, rows)
    assert tiles.dtype == np.int32
    assert [row for _, a, b in tiles for row in range(a, b)] == list(range(starts[-1]))
    assert all(starts[g] <= a < b <= min(starts[g + 1], a + rows) for g, a, b in tiles)
    assert len(tiles) == sum(math.ceil(count / rows) for count in counts)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear_with_launched_kernels_matches_the_formula(launched, counts, parts):
    for actual, correct in zip(*run(counts, parts), strict=True):
        np.testing.assert_allclose(actual, correct, rtol=0, atol=2e-5)
    kernels = ["grouped_product_kernel"] * 2 + ["grouped_weight_gradient_kernel"]
    assert [name for name, *_ in launched] == (kernels if sum(counts) else [])


@pytest.mark.parametrize(("inputs", "outputs"), [(37, 50), (70, 1)])
def test_grouped_linear_of_several_tiles_matches_the_formula(launched, inputs, outputs):
    starts = np.array([0, 19, 19, 60, 61], np.int64)
    arrays = normal(1, 61, inputs), normal(2, 4, outputs, inputs), normal(3, 61, outputs)
    x, weight, gradient = (paddle.to_tensor(each) for each in arrays)
    found = [
        GroupedTriton.forward(x, weight, starts, 1)[0],
        GroupedTriton.input_gradient([gradient], weight, starts),
        GroupedTriton.weight_gradient([gradient], x, weight, starts),
    ]
    for actual, correct in zip(found, expected(*arrays, starts), strict=True):
        np.testing.assert_allclose(actual.numpy(), correct, rtol=0, atol=5e-5)
    forward, input_gradient, weight_gradient = launched
    tiles = 4  # 19, 32 + 9 and 1 rows: three groups have 21 on average
    widths = [16 if count <= 16 else 32 for count in (outputs, inputs)]
    output_tiles, input_tiles = math.ceil(outputs / widths[0]), math.ceil(inputs / widths[1])
    assert forward[3] == {"ROWS": 32, "COLUMNS": widths[0], "TERMS": 16, "BAND": 3}
    assert weight_gradient[3] == {"OUTPUTS": widths[0], "INPUTS": widths[1], "ROWS": 16}
    assert (forward[1], input_gradient[1]) == ((tiles * output_tiles,), (tiles * input_tiles,))
    assert weight_gradient[1] == (4 * output_tiles * input_tiles,)
    assert forward[2][4:] == (tiles, outputs, inputs, outputs * inputs, inputs, 1)
    assert input_gradient[2][4:] == (tiles, inputs, outputs, outputs * inputs, 1, inputs)
    assert [each.data_ptr() for each in forward[2][:2]] == [x.data_ptr(), weight.data_ptr()]


def test_grouped_linear_writes_only_its_results(kernels):
    """Give the product kernel a result with more rows than the tiles have."""
    starts = np.array([0, 5, 9], np.int64)
    x, weight = normal(1, 9, 7), normal(2, 2, 10, 7)
    y = np.full((11, 10), 99, np.float32)
    tiles = row_tiles(starts, 16)
    sizes = {"ROWS": 16, "COLUMNS": 16, "TERMS": 16, "BAND": 8}
    arguments = [HostArray(each) for each in (x, weight, y, tiles)]
    kernels.grouped_product_kernel[(2,)](*arguments, 2, 10, 7, 70, 7, 1, **sizes)
    np.testing.assert_allclose(y[:9], expected(x, weight, np.zeros((9, 10)), starts)[0], atol=2e-5)
    assert (y[9:] == 99).all()


def test_grouped_linear_in_half_precision_accumulates_in_float32(launched):
    """Sum 2100 ones, which float16 cannot: 2048 + 1 is 2048."""
    x, weight = paddle.full([5, 2100], 1.0, "float16"), paddle.full([2, 3, 2100], 1.0, "float16")
    starts = np.array([0, 3, 5], np.int64)
    (y,) = GroupedTriton.forward(x, weight, starts, 1)
    assert y.dtype == paddle.float16 and (y.numpy() == 2100).all()


def test_grouped_linear_of_float32_rows_and_half_weights_returns_the_weights_dtype(launched):
    x, weight = paddle.to_tensor(normal(1, 9, 7)), paddle.to_tensor(normal(2, 2, 10, 7)).astype("float16")
    starts = np.array([0, 5, 9], np.int64)
    (y,) = GroupedTriton.forward(x, weight, starts, 1)
    correct = expected(x.numpy(), weight.numpy(), np.zeros((9, 10)), starts)[0]
    assert y.dtype == paddle.float16
    np.testing.assert_allclose(y.numpy(), correct, atol=2e-2)


def test_grouped_linear_under_autocast_computes_in_its_dtype(launched, monkeypatch):
    pretend_autocast(monkeypatch, "float16")
    for actual, correct in zip(*run([3, 0, 11, 1], 1), strict=True):
        np.testing.assert_allclose(actual, correct, rtol=0, atol=2e-2)
    dtypes = [[x.dtype for x in arguments[:3]] for _, _, arguments, _ in launched]
    half = [paddle.float16] * 3
    assert dtypes == [half, half, [*half[:2], paddle.float32]]  # operands and result: y, dx, dW


@pytest.mark.layouts
def test_grouped_kernels_compile_for_hopper(tmp_path):
    # In a separate process, because this process has the interpreter's kernels.
    environment = script_environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "tests.ops.grouped_linear.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for kernel, tensor_cores in lines:
        assert int(tensor_cores) > 0, f"{kernel} does not use the tensor cores"


def test_triton_backend_of_grouped_linear_on_cpu_raises_value_error():
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        module.grouped_linear_op.choose(paddle.ones([1, 4]), "triton")
