"""Dynamic 8-bit quantizer: levels bitwise equal to bitsandbytes, codes of the nearest levels at every magnitude."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.adamw.quantizer_8bit import Dynamic8Bit, _Table, dynamic_8bit
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels
from tests.golden import DATA

GOLDEN = DATA / "adamw_8bit.npz"


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_dynamic_levels_match_bitsandbytes(kind: str):
    with np.load(GOLDEN) as golden:
        assert np.array_equal(dynamic_levels(kind == "signed"), golden[kind])


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_returns_codes_of_nearest_levels(signed: bool):
    generator, levels = np.random.default_rng(0), dynamic_levels(signed)
    values = generator.uniform(0, 1, 40_000) ** generator.integers(1, 30, 40_000)
    around = [levels, (levels[1:] + levels[:-1]) / 2, [0.0, 1e-30, 1.0]]
    near = np.concatenate([np.float32(edge) * np.float32(1 + shift) for edge in around for shift in (-1e-6, 0, 1e-6)])
    values = np.concatenate([values, np.clip(np.abs(near), 0, 1)]).astype(np.float32)
    if signed:
        values *= generator.choice([-1, 1], len(values)).astype(np.float32)
    distances = np.abs(values.astype(np.float64)[:, None] - levels.astype(np.float64))
    codes = dynamic_8bit(signed).nearest(paddle.to_tensor(values)).numpy()
    chosen = distances[np.arange(len(values)), codes]
    half_ulp = 2.0**-24 * np.abs(values)  # the midpoint of two levels is rounded to fp32
    assert (chosen <= distances.min(axis=1) + 2 * half_ulp).all()


def test_quantize_levels_and_zero_blocks_round_trip_exactly():
    quantizer, levels = dynamic_8bit(True), dynamic_levels(True)
    blocks = np.stack([levels * np.float32(3.5), np.zeros(256, np.float32), levels * np.float32(1e-20)])
    codes, scales = quantizer.quantize(paddle.to_tensor(blocks))
    assert codes.dtype == paddle.uint8 and scales.shape == [3, 1]
    np.testing.assert_allclose(quantizer.dequantize(codes, scales).numpy(), blocks, rtol=1e-6)
    assert (codes.numpy()[1] == quantizer.zero).all()


def test_nearest_with_paddles_gather_gives_same_codes(monkeypatch):
    values, scales = paddle.rand([3, 256]) * 2 - 1, paddle.rand([3, 1])
    codes = dynamic_8bit(True).nearest(values)
    numbers = dynamic_8bit(True).dequantize(codes, scales)
    monkeypatch.setattr(_Table, "look_up", _Table.gather)  # the implementation on GPUs
    assert np.array_equal(Dynamic8Bit(True).nearest(values).numpy(), codes.numpy())
    assert np.array_equal(Dynamic8Bit(True).dequantize(codes, scales).numpy(), numbers.numpy())
