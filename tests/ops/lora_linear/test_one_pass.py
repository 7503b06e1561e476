"""Triton kernel of the LoRA linear in one launch, in the interpreter, against NumPy in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized
from paddlenlp_ext.ops.lora_linear import lora_linear_op
from paddlenlp_ext.ops.lora_linear import triton as module
from paddlenlp_ext.ops.lora_linear.triton import lora_linear_triton
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import run_both_ways
from tests.ops.interpreter import Recorder, bfloat16_products, interpreted, skip_without_triton
from tests.ops.lora_linear.test_lora_linear import SCALING, numbers, on_frozen_base, reference
from tests.ops.norm_linear.test_triton import FORMATS, ROWS_OF_ANY_LENGTH

skip_without_triton()

NF4 = QuantizationConfig(algo="nf4")
TILES = {
    "one way": {"ROWS": 64, "COLUMNS": 32, "WAYS": 1, "SPAN": 64, "BAND": 8, "num_warps": 4, "num_stages": 1},
    "four ways": {"ROWS": 16, "COLUMNS": 16, "WAYS": 4, "SPAN": 32, "BAND": 8, "num_warps": 4, "num_stages": 1},
}
SHAPES = [((1,), 128, 1, 3), ((17,), 384, 37, 16), ((5,), 256, 20, 64)]
ODD_SHAPES = [((3,), 70, 9, 5), ((1, 2), 538, 6, 16), ((17,), 22, 33, 1)]


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.lora_linear.kernels") as kernels:
        yield kernels


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the launches in the interpreter; return them."""
    launches = Recorder()
    monkeypatch.setattr(module, "launch", launches)
    with bfloat16_products():
        yield launches


@pytest.fixture(params=TILES.values(), ids=TILES)
def tiles(request, kernels, monkeypatch):
    """Use small tiles, for any weight and number of positions."""
    monkeypatch.setattr(kernels.ONE_PASS_SIZES, "fixed", request.param)
    for name in ("MOST_POSITIONS", "MOST_POSITIONS_OF_PADDLE"):
        monkeypatch.setattr(module, name, 1 << 20)
    return request.param


def base_of(weight: np.ndarray, bias: np.ndarray | None, options: QuantizationConfig | None):
    """Return a frozen layer, and its weight."""
    bias = None if bias is None else paddle.to_tensor(bias)
    if options is None:
        return FrozenDense(paddle.to_tensor(weight), bias), weight
    packed = quantize(weight, options)
    return FrozenQuantized(packed, bias), dequantize(packed).numpy()


def check(options: QuantizationConfig | None, leading, in_: int, out: int, rank: int) -> None:
    """Compare outputs and gradients with the formula, with a bias for an even number of outputs."""
    x, weight, bias, a, b, gradient = numbers(leading, in_, out, rank)
    has_bias = out % 2 == 0
    base, weight = base_of(weight, bias if has_bias else None, options)
    expected = reference(x, weight, bias if has_bias else 0 * bias, a, b, gradient)
    actual = run_both_ways(lambda *own: lora_linear_triton(own[0], base, *own[1:], SCALING), [x, a, b], gradient)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * abs(other).max())


def check_one_pass(launched: Recorder, *case) -> None:
    """Compare outputs and gradients with the formula, and require one launch in the forward pass."""
    check(*case)
    assert launched.names[0] == "lora_linear_kernel" and "lora_linear_kernel" not in launched.names[1:]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_pass_and_its_gradients_match_the_formula(launched, tiles, shape, options):
    check_one_pass(launched, options, *shape)


@pytest.mark.parametrize("name", ["dense", "fp4 in small blocks, nested"])
def test_one_pass_over_many_positions_matches_the_formula(launched, tiles, name):
    check_one_pass(launched, FORMATS[name], (2, 65), 128, 70, 3)


@pytest.mark.parametrize("options", ROWS_OF_ANY_LENGTH.values(), ids=ROWS_OF_ANY_LENGTH)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_one_pass_over_rows_of_any_length_matches_the_formula(launched, tiles, shape, options):
    check_one_pass(launched, options, *shape)


def test_one_pass_launches_programs_for_tiles_of_rows_and_columns(launched, tiles):
    x, weight, bias, a, b, _ = map(paddle.to_tensor, numbers((10, 13), 96, 70, 20))
    with paddle.no_grad():
        y = lora_linear_triton(x, FrozenDense(weight, bias), a, b, SCALING)
    (launch,) = launched
    assert launch.grid == ({64: 3 * 3, 16: 9 * 5}[tiles["ROWS"]],)
    expected = {"num_rows": 130, "num_columns": 70, "num_inputs": 96, "rank": 20, "scaling": SCALING, "RANK": 32}
    expected |= {"BITS": 0, "HAS_BIAS": True, **tiles}
    assert {name: launch.arguments[name] for name in expected} == expected
    assert launch.arguments["inner"].shape == [130, 20] and launch.arguments["y"] is y
    inner = x.numpy().reshape(130, 96) @ a.numpy().T
    np.testing.assert_allclose(launch.arguments["inner"].numpy(), inner, atol=1e-4)


def test_one_pass_over_codes_passes_tables_and_blocks(launched):
    x, weight, _, a, b, _ = numbers((1,), 128, 20, 16)
    packed = quantize(weight, FORMATS["nf4 in large blocks, nested"])
    with paddle.no_grad():
        tensors = [paddle.to_tensor(each) for each in (x, a, b)]
        lora_linear_triton(tensors[0], FrozenQuantized(packed, None), *tensors[1:], SCALING)
    (launch,) = launched
    expected = {"BITS": 4, "BLOCK": 128, "GROUP": 256, "HAS_BIAS": False, "ROWS": 16, "bias": None}
    assert {name: launch.arguments[name] for name in expected} == expected
    assert launch.arguments["UNIT"] == launch.arguments["SPAN"]
    assert launch.arguments["matrix"] is packed.codes and launch.arguments["group_scales"] is packed.group_scales


@pytest.mark.parametrize("options", [None, NF4], ids=["dense", "nf4"])
@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-10), ("bfloat16", 2.0**-6)])
def test_one_pass_in_half_precision_is_within_rounding(launched, tiles, dtype, rounding, options):
    """Use factors in float32, which the kernel rounds as it does u."""
    x, weight, bias, a, b, gradient = numbers((17,), 64, 37, 16)
    x, weight, a, b = (paddle.to_tensor(each).astype(dtype).astype("float32").numpy() for each in (x, weight, a, b))
    base, weight = base_of(weight, bias, options)
    if options is None:
        base = FrozenDense(base.weight.astype(dtype), base.bias)
    with paddle.no_grad():
        y = lora_linear_triton(*_tensors(x, dtype), base, *_tensors(a), *_tensors(b), SCALING)
    expected = reference(x, weight, bias, a, b, gradient)[0]
    largest = reference(abs(x), abs(weight), abs(bias), abs(a), abs(b), abs(gradient))[0]
    assert y.dtype == getattr(paddle, dtype)
    assert (abs(y.astype("float32").numpy() - expected) <= rounding * largest).all()
    assert launched.names == ["lora_linear_kernel"]


def _tensors(array: np.ndarray, dtype: str = "float32") -> tuple[paddle.Tensor]:
    return (paddle.to_tensor(array).astype(dtype),)


def test_one_pass_in_float16_rounds_the_sum_once(launched, tiles):
    """Add -3/4 to 2049.25, which float16 would store as 2050 and then leave there."""
    x, weight, a = (paddle.to_tensor([row], "float16") for row in ([1.0, 1.25], [2048.0, 1.0], [1.0, 0.0]))
    with paddle.no_grad():
        y = lora_linear_triton(x, FrozenDense(weight, None), a, paddle.ones([1, 1], "float16"), -0.75)
    assert y.item() == 2048.0
    assert launched.names == ["lora_linear_kernel"]


def test_one_pass_gives_the_same_bits_again(launched, tiles):
    x, weight, _, a, b, gradient = numbers((60,), 100, 70, 8)
    run = on_frozen_base(lora_linear_triton, weight, None)
    for one, other in zip(*(run_both_ways(run, [x, a, b], gradient) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("positions", "first"), [(64, "lora_linear_kernel"), (65, "add_low_rank_kernel")])
def test_lora_linear_triton_over_codes_takes_one_pass_up_to_64_positions(launched, positions, first):
    check(NF4, (positions,), 64, 5, 4)
    assert launched.names == [first, "low_rank_gradients_kernel", "add_low_rank_kernel"]


def test_few_positions_over_weights_that_paddle_multiplies_launch_nothing(launched, monkeypatch):
    check(None, (3,), 64, 20, 4)
    monkeypatch.setattr("paddlenlp_ext.ops.frozen_linear.takes_weight_only", lambda x, weight: True)
    check(QuantizationConfig(algo="weight_only_int8"), (3,), 64, 20, 4)
    assert not launched


def test_one_pass_of_a_column_slice_copies_it(launched):
    x, weight, bias, a, b, _ = numbers((7,), 64, 5, 4)
    wide, (base, weight) = paddle.to_tensor(np.concatenate([x + 1, x, x - 1], axis=1)), base_of(weight, bias, NF4)
    with paddle.no_grad():
        y = lora_linear_triton(wide[:, 64:128], base, *_tensors(a), *_tensors(b), SCALING)
    np.testing.assert_allclose(y.numpy(), reference(x, weight, bias, a, b, x[:, :5])[0], atol=1e-3)
    assert launched.names == ["lora_linear_kernel"]


UNSUPPORTED = {
    "a rank above 64": (NF4, (3,), 64, 20, 65),
    "a block in two rows": (NF4, (3,), 96, 20, 4),
    "blocks of 6": (QuantizationConfig(algo="nf4", block_size=6), (3,), 24, 20, 4),
}


@pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_few_positions_that_one_pass_does_not_support_launch_nothing(launched, case):
    check(*case)
    assert not launched


def test_few_positions_under_autocast_launch_nothing(launched, monkeypatch):
    monkeypatch.setattr(paddle, "is_autocast_enabled", lambda: True)  # Paddle has no autocast on a CPU
    monkeypatch.setattr(paddle, "get_autocast_dtype", lambda: "float32")
    check(NF4, (3,), 64, 20, 4)
    assert not launched


def test_few_positions_in_another_dtype_than_the_weight_do_not_fit_one_pass(tiles):
    x, weight, a = (paddle.ones(shape) for shape in ([3, 64], [20, 64], [4, 64]))
    assert module.supports_one_pass(x, FrozenDense(weight, None), a)
    assert not module.supports_one_pass(x, FrozenDense(weight.astype("float16"), None), a)


def test_lora_linear_in_double_precision_takes_no_kernel():
    x = SimpleNamespace(place=AbsentGpu(), dtype=paddle.float64)
    assert str(lora_linear_op.unavailable_reason("triton", x)).startswith("the backend computes only in float32")
