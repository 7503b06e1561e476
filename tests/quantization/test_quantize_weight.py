"""Test quantization: int8 and int4 against their formula, size and error of each format, invalid input."""

from __future__ import annotations

import time

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels
from paddlenlp_ext.quantization.config import ALGOS, QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from paddlenlp_ext.quantization.quantize_weight import empty, quantize, quantize_layer
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear


def weight_of(out: int, width: int) -> np.ndarray:
    weight = np.random.default_rng([out, width]).standard_normal((out, width)).astype(np.float32)
    weight *= np.linspace(0.01, 3, out, dtype=np.float32)[:, None]
    weight[out // 2] = 0.0
    return weight


def unpacked(codes: np.ndarray, count: int) -> np.ndarray:
    return np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[:count]


def test_quantize_int8_has_one_scale_per_row():
    weight = weight_of(9, 35)
    stored = quantize(weight, QuantizationConfig(algo="weight_only_int8"))
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    np.testing.assert_allclose(stored.scales.numpy(), scales, rtol=1e-7)
    codes = np.rint(weight / np.where(scales > 0, scales, 1)[:, None])
    assert np.array_equal(stored.codes.numpy().reshape(9, 35), codes)
    assert stored.codes.numpy().min() >= -127
    np.testing.assert_allclose(dequantize(stored).numpy(), codes * scales[:, None], rtol=1e-6)
    assert np.abs(dequantize(stored).numpy() - weight).max() <= 0.501 * scales.max()


@pytest.mark.parametrize("group", [None, 4, 12])
def test_quantize_int4_has_one_scale_per_row_or_group(group: int | None):
    weight = weight_of(5, 36)
    stored = quantize(weight, QuantizationConfig(algo="weight_only_int4", group_size=group))
    blocks = weight.reshape(-1, group or 36)
    scales = np.abs(blocks).max(axis=1) / np.float32(7)
    np.testing.assert_allclose(stored.scales.numpy(), scales, rtol=1e-7)
    codes = np.rint(blocks / np.where(scales > 0, scales, 1)[:, None])
    assert np.array_equal(unpacked(stored.codes.numpy(), weight.size).astype(int) - 8, codes.reshape(-1))
    np.testing.assert_allclose(dequantize(stored).numpy(), (codes * scales[:, None]).reshape(5, 36), rtol=1e-6)


def test_quantize_codes_are_nearest_levels():
    weight = weight_of(16, 64)
    for algo in ("nf4", "nf4_symmetric", "fp4"):
        stored = quantize(weight, QuantizationConfig(algo=algo))
        largest = np.abs(weight).max(axis=1, keepdims=True)
        distance = np.abs((weight / np.where(largest > 0, largest, 1))[..., None] - levels(algo))
        chosen = levels(algo)[unpacked(stored.codes.numpy(), weight.size)].reshape(weight.shape)
        found = np.abs(weight / np.where(largest > 0, largest, 1) - chosen)
        np.testing.assert_allclose(found, distance.min(axis=2), atol=1e-6)
        np.testing.assert_allclose(dequantize(stored).numpy(), chosen * largest, rtol=1e-6, atol=0)


def test_levels_nf4_are_quantiles_of_normal_distribution():
    table = levels("nf4")
    assert table[7] == 0 and table[0] == -1 and table[15] == 1
    assert np.all(np.diff(table) > 0)
    sample = np.random.default_rng(0).standard_normal(1_000_000)
    outermost = np.quantile(sample, 0.9677083)
    for side, count in ((table[7:] * outermost, 8), (-table[7::-1] * outermost, 7)):
        shares = [(sample < value).mean() for value in side]
        np.testing.assert_allclose(np.diff(shares), (0.9677083 - 0.5) / count, atol=2e-3)


def test_dynamic_levels_match_definition():
    table = dynamic_levels()
    assert len(np.unique(table)) == 256
    assert table[-1] == 1.0 and table[127] == 0.0
    assert np.array_equal(table[:127], -table[128:255][::-1])


@pytest.mark.parametrize("algo", ["nf4", "fp4"])
def test_quantize_double_quantization_costs_at_most_4_2_bits(algo: str):
    weight = np.random.default_rng(0).standard_normal((576, 1536)).astype(np.float32)
    single, double = (
        QuantizedLinear(quantize(weight, QuantizationConfig(algo=algo, double_quant=d))) for d in (False, True)
    )
    assert 8 * single.num_bytes / weight.size == 4.5
    assert 8 * double.num_bytes / weight.size <= 4.2
    held = sum(tensor.numpy().nbytes for tensor in double.state_dict().values())
    assert held == double.num_bytes
    assert weight.nbytes / held > 7.6


def test_quantize_finer_format_has_smaller_error():
    weight = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    formats = [
        QuantizationConfig(algo="weight_only_int8"),
        QuantizationConfig(algo="nf4"),
        QuantizationConfig(algo="nf4", double_quant=True),
        QuantizationConfig(algo="fp4"),
        QuantizationConfig(algo="weight_only_int4"),
    ]
    errors = [float(np.square(dequantize(quantize(weight, o)).numpy() - weight).mean()) for o in formats]
    assert errors == sorted(errors)
    assert errors[2] < 1.02 * errors[1]


def test_quantize_accepts_half_precision_weights():
    weight = paddle.to_tensor(weight_of(8, 64)).astype("bfloat16")
    stored = quantize(weight, QuantizationConfig(algo="nf4"))
    again = quantize(weight.astype("float32"), QuantizationConfig(algo="nf4"))
    assert np.array_equal(stored.codes.numpy(), again.codes.numpy())


def test_empty_has_shapes_of_quantized_weight():
    for options in (
        QuantizationConfig(algo="nf4", double_quant=True, double_quant_block_size=2),
        QuantizationConfig(algo="weight_only_int8"),
        QuantizationConfig(algo="weight_only_int4", group_size=4),
    ):
        expected, found = quantize(weight_of(7, 36), options), empty((7, 36), options)
        assert found.num_bytes == expected.num_bytes
        for name in ("codes", "scales", "group_scales", "offset"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert (found.shape, found.block_size, found.group_size) == (
            expected.shape,
            expected.block_size,
            expected.group_size,
        )


@pytest.mark.parametrize("algo", ALGOS)
def test_quantize_in_chunks_gives_same_codes(algo: str, monkeypatch: pytest.MonkeyPatch):
    weight, options = weight_of(37, 33), QuantizationConfig(algo=algo, block_size=64, double_quant=True)
    full = quantize(weight, options)
    monkeypatch.setattr("paddlenlp_ext.quantization.quantize_weight._CHUNK", 200)
    parts = quantize(weight, options)
    for name in ("codes", "scales", "group_scales", "offset"):
        assert np.array_equal(getattr(parts, name).numpy(), getattr(full, name).numpy()), name


def test_quantize_linears_mixes_formats_by_name():
    options = QuantizationConfig(
        algo={"q_proj": "nf4", r".*\.mlp\..*": "weight_only_int8", "lm_head": None}, block_size=32
    )
    assert options.for_layer("model.layers.0.self_attn.q_proj") == QuantizationConfig(algo="nf4", block_size=32)
    assert options.for_layer("model.layers.0.mlp.up_proj").algo == "weight_only_int8"
    assert options.for_layer("lm_head") is None
    assert options.for_layer("model.layers.0.self_attn.k_proj") is None


def test_quantize_invalid_input_raises():
    with pytest.raises(ValueError, match=r"weight_quantize_algo='nf5' is not known; did you mean 'nf4'\?"):
        QuantizationConfig(algo="nf5")
    with pytest.raises(ValueError, match="qlora_weight_blocksize=63 is out of range"):
        QuantizationConfig(algo="nf4", block_size=63)
    with pytest.raises(ValueError, match="group_size=10 does not divide the 36 inputs"):
        quantize(weight_of(4, 36), QuantizationConfig(algo="weight_only_int4", group_size=10))
    weight = weight_of(4, 36)
    weight[1, 3] = np.nan
    for algo in ("nf4", "weight_only_int8"):
        with pytest.raises(ValueError, match="not finite"):
            quantize(weight, QuantizationConfig(algo=algo))
    with pytest.raises(ValueError, match=r"layers\.0\.up_proj: .* not finite"):
        quantize_layer("layers.0.up_proj", paddle.to_tensor(weight), QuantizationConfig(algo="fp4"))


def test_quantize_linears_twice_raises():
    config = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(config | layers)
    quantize_linears(model, QuantizationConfig(algo="nf4"))
    with pytest.raises(ValueError, match="already quantized \\(nf4, blocks of 64\\); load the original model"):
        quantize_linears(model, QuantizationConfig(algo="fp4"))


def test_quantized_linear_uses_weight_value_and_has_no_parameters():
    bias = paddle.to_tensor(np.arange(7, dtype=np.float32), stop_gradient=False)
    layer = QuantizedLinear(quantize(weight_of(7, 36), QuantizationConfig(algo="nf4", double_quant=True)), bias)
    assert (layer.in_features, layer.out_features) == (36, 7)
    assert all(parameter.stop_gradient for parameter in layer.parameters())
    x = np.random.default_rng(1).standard_normal((2, 3, 36)).astype(np.float32)
    expected = x @ layer.weight_value().numpy().T
    np.testing.assert_allclose(layer.forward_without_bias(paddle.to_tensor(x)).numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected + bias.numpy(), atol=1e-4)
    assert {name for name in layer.state_dict() if "bias" not in name} == {"codes", "scales", "group_scales", "offset"}


def test_quantized_linear_computes_with_loaded_values():
    options = QuantizationConfig(algo="nf4", double_quant=True)
    full, blank = QuantizedLinear(quantize(weight_of(7, 36), options)), QuantizedLinear(empty((7, 36), options))
    blank.set_state_dict(full.state_dict())
    assert np.array_equal(blank.weight_value().numpy(), full.weight_value().numpy())


def test_quantize_is_as_fast_as_a_few_binary_searches():
    """Compare processor time with NumPy's binary search of 15 boundaries."""
    weight, middles = weight_of(512, 576), np.linspace(-1, 1, 15, dtype=np.float32)
    options = QuantizationConfig(algo="nf4", double_quant=True)
    ours, searching = [], []
    for _ in range(5):
        begin = time.process_time()
        quantize(weight, options)
        middle = time.process_time()
        np.searchsorted(middles, weight)
        ours.append(middle - begin)
        searching.append(time.process_time() - middle)
    assert min(ours) < 3 * min(searching)
