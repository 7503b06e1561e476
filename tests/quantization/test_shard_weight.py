"""Test shards of quantized weights: values of the full weight, smaller blocks, unsupported shapes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.config import ALGOS, QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.quantization.shard_weight import slice_weight
from paddlenlp_ext.sharding_spec import Shard


def weight_of(out: int, width: int) -> np.ndarray:
    return np.random.default_rng(out).standard_normal((out, width)).astype(np.float32)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("out", "width"), [(6, 96), (10, 64), (4, 160)])
def test_slice_weight_shards_have_values_of_full_weight(algo, double, axis, out, width):
    options = QuantizationConfig(algo=algo, double_quant=double and algo in ("nf4", "fp4"), double_quant_block_size=4)
    full = quantize(weight_of(out, width), options)
    values, half = dequantize(full).numpy(), full.shape[axis] // 2
    for start in (0, half):
        shard = Shard(axis, start, start + half, full.shape[axis])
        part = slice_weight(full, shard)
        assert part.shape == shape_of_shard(values, shard)
        assert part.codes.size * 2 == full.codes.size
        np.testing.assert_array_equal(dequantize(part).numpy(), values[shard.index])


def shape_of_shard(values: np.ndarray, shard: Shard) -> tuple[int, ...]:
    return values[shard.index].shape


def test_slice_weight_reduces_block_size_as_needed():
    full = quantize(weight_of(6, 96), QuantizationConfig(algo="nf4"))
    assert slice_weight(full, Shard(0, 0, 2, 6)).block_size == 64
    assert slice_weight(full, Shard(0, 0, 3, 6)).block_size == 32
    assert slice_weight(full, Shard(1, 48, 96, 96)).block_size == 16
    grouped = quantize(weight_of(6, 96), QuantizationConfig(algo="weight_only_int4", group_size=8))
    assert slice_weight(grouped, Shard(1, 48, 96, 96)).block_size == 8


@pytest.mark.parametrize(
    ("algo", "shape", "shard"),
    [
        ("nf4", (6, 48), Shard(1, 0, 24, 48)),
        ("weight_only_int4", (6, 6), Shard(1, 0, 3, 6)),
        ("weight_only_int4", (2, 7), Shard(0, 1, 2, 2)),
        ("weight_only_int8", (6, 16), Shard(1, 0, 8, 16)),
    ],
)
def test_slice_weight_unsupported_size_raises(algo, shape, shard):
    full = quantize(weight_of(*shape), QuantizationConfig(algo=algo))
    message = rf"{algo} in blocks of \d+ cannot be sharded: for shards with {shard.stop - shard.start} of"
    with pytest.raises(ValueError, match=message):
        slice_weight(full, shard)


def test_shard_weight_layer_computes_with_its_shard():
    options = QuantizationConfig(algo="nf4", double_quant=True)
    layer = QuantizedLinear(quantize(weight_of(8, 128), options))
    x = paddle.to_tensor(weight_of(3, 128))
    full = layer(x).numpy()
    layer.shard_weight(Shard(0, 4, 8, 8))
    assert (layer.out_features, layer.in_features) == (4, 128)
    assert sorted(name for name, _ in layer.named_buffers()) == ["codes", "scales"]
    np.testing.assert_allclose(layer(x).numpy(), full[:, 4:], rtol=1e-6, atol=1e-5)
