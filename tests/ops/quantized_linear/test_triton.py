"""Triton 4-bit kernels in the interpreter against the packed format's formula in NumPy."""

from __future__ import annotations

import importlib
import importlib.util
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.ops.dequantize import dequantize, dequantize_op
from paddlenlp_ext.ops.dequantize import triton as dequantize_module
from paddlenlp_ext.ops.quantized_linear import quantized_linear_op
from paddlenlp_ext.ops.quantized_linear import triton as linear_module
from paddlenlp_ext.ops.quantized_linear.triton import quantized_linear_triton
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels
from paddlenlp_ext.ops.quantized_weight.triton import on_gpu_in_4_bits
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import normal
from tests.common.gpu import pretend_autocast
from tests.common.scripts import script_environment
from tests.ops.host_array import HostArray
from tests.ops.interpreter import Recorder, bfloat16_products

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)

GROUP = 3  # small, so that tiny weights have several blocks
CASES = [  # outputs, inputs, block, nested, algo
    (1, 2, 64, False, "nf4"),
    (7, 10, 64, False, "nf4"),
    (5, 26, 6, True, "nf4"),
    (33, 70, 10, True, "fp4"),
    (20, 128, 64, False, "fp4"),
    (17, 130, 26, True, "weight_only_int4"),
]


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads the variable when a kernel is defined, for its own kernels when it is first imported.
        patch.setenv("TRITON_INTERPRET", "1")
        names = ("norm_linear", "dequantize", "quantized_linear")
        modules = [importlib.import_module(f"paddlenlp_ext.ops.{name}.kernels") for name in names]
        yield SimpleNamespace(**vars(modules[1]) | vars(modules[2]))


class Packed:
    """Random packed weight: the kernels' arguments and the dequantized weight."""

    def __init__(self, outputs: int, inputs: int, block: int, nested: bool, algo: str) -> None:
        generator, count = np.random.default_rng(outputs * inputs), outputs * inputs
        self.codes = generator.integers(0, 256, -(-count // 2)).astype(np.uint8)
        num_scales = -(-count // block)
        self.format = {"BLOCK": block, "GROUP": GROUP, "NESTED": nested}
        if nested:
            codes = generator.integers(0, 256, num_scales).astype(np.uint8)
            groups = generator.uniform(0.5, 2, -(-num_scales // GROUP)).astype(np.float32)
            offset = np.array([0.25], np.float32)
            self.scales, self.nested = codes, (dynamic_levels().copy(), groups, offset)
            values = self.nested[0][codes] * np.repeat(groups, GROUP)[:num_scales] + offset
        else:
            self.scales, self.nested = generator.uniform(0.5, 2, num_scales).astype(np.float32), None
            values = self.scales
        self.levels = levels(algo).copy()
        uses_bf16 = np.stack([self.codes >> 4, self.codes & 15], axis=1).reshape(-1)[:count]
        self.weight = (self.levels[uses_bf16] * np.repeat(values, block)[:count]).reshape(outputs, inputs)

    def arguments(self, first_byte: int = 0, first_scale: int = 0) -> list[HostArray]:
        unused = np.zeros(1, np.float32)
        nested = self.nested or (unused, unused, unused)
        arrays = (self.codes[first_byte:], self.levels, self.scales[first_scale:], *nested)
        return [HostArray(array) for array in arrays]


def dequantize_all(kernels, packed, out):
    count, grid = packed.weight.size, (math.ceil(packed.weight.size / 64),)
    sizes = (count, math.ceil(count / 2), 0)
    kernels.dequantize_kernel[grid](*packed.arguments(), out, *sizes, BYTES=32, **packed.format)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantize_kernel_matches_the_formula(kernels, case):
    packed = Packed(*case)
    out = HostArray(np.full(packed.weight.size + 1, 99, np.float32))
    dequantize_all(kernels, packed, out)
    np.testing.assert_allclose(out.array[:-1].reshape(packed.weight.shape), packed.weight, rtol=1e-6, atol=1e-7)
    assert out.array[-1] == 99  # the kernel writes nothing beyond the weight


def test_dequantize_kernel_of_some_rows_matches_the_formula(kernels):
    packed = Packed(9, 20, 10, True, "nf4")
    first, count = 4, 3 * 20
    out = HostArray(np.zeros(count, np.float32))
    arguments = packed.arguments(first_byte=first * 10, first_scale=first * 2)
    kernels.dequantize_kernel[(2,)](*arguments, out, count, count // 2, first * 2, BYTES=16, **packed.format)
    np.testing.assert_allclose(out.array.reshape(3, 20), packed.weight[4:7], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dequantize_kernel_in_half_precision_rounds_the_weight(kernels, dtype):
    packed = Packed(8, 64, 64, False, "nf4")
    want = packed.weight.reshape(-1)
    out = HostArray(np.zeros(want.size, np.uint16 if dtype == "bfloat16" else np.float16), dtype)
    dequantize_all(kernels, packed, out)
    if dtype == "bfloat16":  # upper bits only: the interpreter truncates, while a GPU rounds
        assert np.array_equal(out.array, (want.view(np.uint32) >> 16).astype(np.uint16))
    else:
        assert np.array_equal(out.array, want.astype(np.float16))


PRODUCTS = [  # outputs, inputs, block, nested, algo
    (1, 2, 2, False, "nf4"),
    (7, 10, 2, True, "fp4"),
    (5, 24, 8, True, "nf4"),
    (20, 192, 64, False, "fp4"),
    (17, 128, 64, True, "nf4"),
]


def product(kernels, packed, x, y, **sizes):
    (positions, inputs), outputs = x.shape, packed.weight.shape[0]
    grid = (math.ceil(outputs / sizes["OUTPUTS"]), positions)
    kernels.product_kernel[grid](HostArray(x), *packed.arguments(), y, outputs, inputs, **sizes, **packed.format)


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("blocks", [1, 4])
def test_product_kernel_matches_the_formula(kernels, case, positions, blocks):
    packed = Packed(*case)
    outputs, inputs = packed.weight.shape
    x = np.random.default_rng(7).standard_normal((positions, inputs)).astype(np.float32)
    y = HostArray(np.full((positions + 1, outputs), 99, np.float32))
    product(kernels, packed, x, y, OUTPUTS=4, BLOCKS=blocks)
    np.testing.assert_allclose(y.array[:-1], x @ packed.weight.T, rtol=1e-4, atol=1e-4)
    assert (y.array[-1] == 99).all()


def test_product_kernel_in_half_precision_is_within_rounding(kernels):
    packed = Packed(20, 128, 64, True, "nf4")
    x = np.random.default_rng(8).standard_normal((3, 128)).astype(np.float16)
    y = HostArray(np.zeros((3, 20), np.float16))
    product(kernels, packed, x, y, OUTPUTS=4, BLOCKS=2)
    np.testing.assert_allclose(y.array, x.astype(np.float32) @ packed.weight.T, rtol=2e-3, atol=2e-2)


@pytest.fixture
def launched(kernels, monkeypatch):
    """Redirect launches to the interpreter and record them."""
    launches = Recorder()
    for module in (dequantize_module, linear_module):
        monkeypatch.setattr(module, "launch", launches)
    return launches


OPTIONS = [
    QuantizationConfig(algo="nf4", block_size=32),
    QuantizationConfig(algo="fp4", block_size=16, double_quant=True, double_quant_block_size=4),
    QuantizationConfig(algo="weight_only_int4"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_quantized_linear_with_launched_kernels_matches_the_formula(launched, options):
    generator = np.random.default_rng(0)
    weight = quantize(generator.standard_normal((24, 32)).astype(np.float32), options)
    full = dequantize(weight).numpy()
    rows = dequantize_module.dequantize_rows_triton(weight, 8, 20).numpy()
    np.testing.assert_allclose(rows, full[8:20], rtol=1e-6, atol=1e-7)
    x = generator.standard_normal((2, 32)).astype(np.float32)
    y = quantized_linear_triton(paddle.to_tensor(x), weight).numpy()
    np.testing.assert_allclose(y, x @ full.T, rtol=1e-4, atol=1e-5)
    assert len(launched) == 2


def test_dequantize_rows_triton_launches_programs_of_its_rows_only(launched, kernels, monkeypatch):
    monkeypatch.setattr(kernels.DEQUANTIZE_SIZES, "fixed", {"BYTES": 64, "num_warps": 4})
    weight = quantize(normal(0, 24, 96), OPTIONS[0])  # a row has 48 bytes and 3 scales
    dequantize_module.dequantize_rows_triton(weight, 8, 20, paddle.float16)
    ((name, grid, arguments),) = launched
    assert (name, grid) == ("dequantize_kernel", (9,))
    assert arguments["codes"].data_ptr() == weight.codes.data_ptr() + 8 * 48
    assert arguments["scales"].data_ptr() == weight.scales.data_ptr() + 8 * 3 * 4
    numbers = {"count": 12 * 96, "num_bytes": 12 * 48, "first_scale": 8 * 3, "BLOCK": 32, "NESTED": False}
    assert {key: arguments[key] for key in numbers} == numbers
    assert (arguments["out"].shape, arguments["out"].dtype) == ([12, 96], paddle.float16)


def test_product_triton_launches_programs_of_each_position(launched, kernels, monkeypatch):
    monkeypatch.setattr(kernels.PRODUCT_SIZES, "fixed", {"OUTPUTS": 4, "INPUTS": 512, "num_warps": 2})
    weight, x = quantize(normal(0, 26, 96), OPTIONS[0]), paddle.to_tensor(normal(1, 96, 2)).T
    linear_module.product_triton(x, weight)
    ((name, grid, arguments),) = launched
    assert (name, grid) == ("product_kernel", (7, 2))
    numbers = {"num_outputs": 26, "num_inputs": 96, "BLOCK": 32, "OUTPUTS": 4, "BLOCKS": 16, "num_warps": 2}
    assert {key: arguments[key] for key in numbers} == numbers
    assert arguments["x"].is_contiguous(), "the kernel takes no strides"


@pytest.mark.parametrize(
    ("positions", "name"), [(1, "product_kernel"), (3, "norm_linear_kernel"), (16, "norm_linear_kernel")]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linear_triton_of_few_positions_launches_one_product(launched, options, positions, name):
    generator = np.random.default_rng(0)
    weight = quantize(generator.standard_normal((40, 64)).astype(np.float32), options)
    x = generator.standard_normal((positions, 64)).astype(np.float32)
    y = quantized_linear_triton(paddle.to_tensor(x).unsqueeze(1), weight)
    assert y.shape == [positions, 1, 40]
    np.testing.assert_allclose(y.numpy()[:, 0], x @ dequantize(weight).numpy().T, rtol=0, atol=1e-4)
    assert launched.names == [name]


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_triton_under_autocast_computes_in_its_dtype(launched, monkeypatch, positions, dtype):
    weight, x = quantize(normal(0, 40, 64), OPTIONS[0]), normal(1, positions, 64)
    pretend_autocast(monkeypatch, dtype)
    with bfloat16_products():
        y = quantized_linear_triton(paddle.to_tensor(x), weight)
    assert y.dtype == getattr(paddle, dtype)
    np.testing.assert_allclose(y.astype("float32").numpy(), x @ dequantize(weight).numpy().T, rtol=0.02, atol=0.2)
    assert len(launched) == 1


def test_dequantize_rows_triton_with_two_scales_per_byte_uses_both(launched):
    """Test int4 with one scale per row and rows of odd length, which end within a byte."""
    weight = quantize(np.random.default_rng(0).standard_normal((6, 33)).astype(np.float32), OPTIONS[2])
    rows = dequantize_module.dequantize_rows_triton(weight, 2, 6).numpy()
    np.testing.assert_array_equal(rows, dequantize(weight).numpy()[2:])
    assert not launched
    assert dequantize_op._backends["triton"][0] is dequantize_module.dequantize_rows_triton


@pytest.mark.parametrize(("positions", "width"), [(100, 32), (1, 48)], ids=["many positions", "blocks in two rows"])
def test_linear_triton_with_unsupported_sizes_uses_dequantized_rows(launched, positions, width):
    weight = quantize(np.random.default_rng(0).standard_normal((24, width)).astype(np.float32), OPTIONS[0])
    x = paddle.randn([positions, width])
    np.testing.assert_allclose(
        quantized_linear_triton(x, weight).numpy(), (x @ dequantize(weight).T).numpy(), atol=1e-5
    )
    assert not launched


@pytest.mark.layouts
def test_triton_kernels_compile_for_hopper(tmp_path):
    # In a separate process, because this process has the interpreter's kernels.
    environment = script_environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "tests.ops.quantized_linear.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 12
    for kernel, dtype, nested, wide_loads in lines:
        assert int(wide_loads) > 0, f"{kernel} reads codes byte by byte, {dtype}, nested scales {nested}"


def test_triton_on_cpu_raises_value_error():
    weight = quantize(np.ones((8, 64), np.float32), OPTIONS[0])
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        dequantize_op.choose(weight.codes, "triton")
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        quantized_linear_op("nf4").choose(paddle.ones([1, 64]), "triton")
    on_gpu = SimpleNamespace(place=AbsentGpu(), dtype=paddle.int8)
    assert on_gpu_in_4_bits(on_gpu) == "the backend supports only 4-bit weights"
    on_gpu.dtype = paddle.uint8
    assert on_gpu_in_4_bits(on_gpu) is None
