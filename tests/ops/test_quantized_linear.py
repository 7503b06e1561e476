"""The product with packed weights against NumPy, forward and backward, and what it asks of Paddle's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import dequantize as dequantize_module
from paddlenlp_ext.ops import quantized_linear as linear_module
from paddlenlp_ext.ops import weight_only
from paddlenlp_ext.ops.dequantize import QuantizedWeight, dequantize, dequantize_rows_numpy, dequantize_rows_reference
from paddlenlp_ext.ops.quantized_linear import input_gradient_op, linear_op, quantized_linear
from paddlenlp_ext.quant.options import QuantOptions
from paddlenlp_ext.quant.quantize import quantize

FORMATS = [
    QuantOptions(algo="nf4"),
    QuantOptions(algo="nf4", double_quant=True, double_quant_block_size=4),
    QuantOptions(algo="fp4", block_size=34, double_quant=True),
    QuantOptions(algo="weight_only_int8"),
    QuantOptions(algo="weight_only_int8", double_quant=True),
    QuantOptions(algo="weight_only_int4"),
]
SHAPES = [(12, 33), (7, 64), (1, 5), (130, 20)]
by_format = pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.algo}{'-double' * o.double_quant}")
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def packed(shape: tuple[int, int], options: QuantOptions) -> QuantizedWeight:
    return quantize(np.random.default_rng(shape).standard_normal(shape).astype(np.float32), options)


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_module, "row_blocks", lambda weight: dequantize_module.row_blocks(weight, 100))


@by_format
@by_shape
def test_both_ways_to_dequantize_give_the_same_bits(shape: tuple[int, int], options: QuantOptions):
    weight = packed(shape, options)
    parts = list(dequantize_module.row_blocks(weight, 100))
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == shape[0]
    whole = dequantize(weight).numpy()
    for way in (dequantize_rows_numpy, dequantize_rows_reference):
        assert np.array_equal(np.concatenate([way(weight, *part).numpy() for part in parts]), whole), way.__name__


@by_format
@by_shape
def test_product_and_gradient_are_those_of_the_dequantized_weight(
    shape: tuple[int, int], options: QuantOptions, few_at_a_time: None
):
    weight = packed(shape, options)
    generator = np.random.default_rng(0)
    x = paddle.to_tensor(generator.standard_normal((2, 3, shape[1])).astype(np.float32), stop_gradient=False)
    gradient = generator.standard_normal((2, 3, shape[0])).astype(np.float32)
    y = quantized_linear(x, weight)
    (y * paddle.to_tensor(gradient)).sum().backward()
    plain = dequantize(weight).numpy().astype(np.float64)
    np.testing.assert_allclose(y.numpy(), x.numpy() @ plain.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.grad.numpy(), gradient @ plain, rtol=1e-5, atol=1e-5)


def test_an_input_that_wants_no_gradient_gets_none():
    weight = packed((7, 64), FORMATS[0])
    scale = paddle.ones([1])
    scale.stop_gradient = False
    (quantized_linear(paddle.ones([2, 64]), weight) * scale).sum().backward()
    assert scale.grad is not None


def test_no_whole_weight_is_ever_made(monkeypatch: pytest.MonkeyPatch, few_at_a_time: None):
    largest = []
    rows = dequantize_module.dequantize_rows

    def watched(weight: QuantizedWeight, first: int, last: int) -> paddle.Tensor:
        largest.append((last - first) * weight.shape[1])
        return rows(weight, first, last)

    monkeypatch.setattr(linear_module, "dequantize_rows", watched)
    x = paddle.ones([3, 64])
    x.stop_gradient = False
    quantized_linear(x, packed((40, 64), FORMATS[0])).sum().backward()
    assert len(largest) == 2 * 40
    assert max(largest) == 64


def test_every_format_has_an_op():
    for options in FORMATS:
        for op in (linear_op(options.algo), input_gradient_op(options.algo)):
            assert op.choose(paddle.ones([1])) in (
                linear_module.linear_reference,
                linear_module.input_gradient_reference,
            )
    with pytest.raises(ValueError, match="'weight_only' was asked for, but it needs a GPU"):
        linear_op("weight_only_int8").choose(paddle.ones([1]), "weight_only")


# -- Paddle's kernel, which runs on GPUs alone ----------------------------------------------
@pytest.mark.parametrize(
    ("options", "group"),
    [
        (QuantOptions(algo="weight_only_int8"), -1),
        (QuantOptions(algo="weight_only_int8", double_quant=True), -1),
        (QuantOptions(algo="weight_only_int4"), -1),
        (QuantOptions(algo="weight_only_int4", group_size=64), 64),
    ],
)
def test_the_kernel_is_given_our_codes_and_scales(monkeypatch: pytest.MonkeyPatch, options: QuantOptions, group: int):
    calls: list[dict[str, Any]] = []
    paddles_quantize = paddle.nn.quant.weight_quantize

    def on_a_gpu(x: paddle.Tensor, algo: str, group_size: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        codes, scales = paddles_quantize(x, algo=algo, arch=80, group_size=group_size)
        np.testing.assert_allclose(scales.astype("float32").numpy(), 1.0, rtol=1e-3)
        return codes, scales

    def kernel(x: paddle.Tensor, **arguments: Any) -> paddle.Tensor:
        calls.append(arguments)
        return paddle.zeros([x.shape[0], 64], x.dtype)

    monkeypatch.setattr(weight_only.quant, "weight_quantize", on_a_gpu)
    monkeypatch.setattr(weight_only.quant, "weight_only_linear", kernel)
    weight = packed((64, 128), options)
    for _ in range(2):
        weight_only.weight_only_linear(paddle.ones([3, 128], "float16"), weight)
    first, second = calls
    assert first["weight"] is second["weight"]
    assert first["weight_dtype"] == options.algo.removeprefix("weight_only_")
    assert first["group_size"] == group
    assert first["weight_scale"].dtype == paddle.float16
    assert first["weight_scale"].shape == ([64] if group < 0 else [2, 64])
    found, wanted = first["weight"].numpy().view(np.uint8), weight.codes.numpy().view(np.uint8)
    if options.algo == "weight_only_int8":  # the kernel's order is its own; its codes count from 128
        assert np.array_equal(np.sort(found.reshape(-1) ^ 0x80), np.sort(wanted))
    else:
        halves = [np.sort(np.concatenate([a.reshape(-1) >> 4, a.reshape(-1) & 15])) for a in (found, wanted)]
        assert np.array_equal(*halves)
