"""Stochastic rounding against Philox and bit arithmetic in NumPy; bias, and draws of shards."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.cpp.library import set_threads
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition, stochastic_round_cpp, stochastic_round_reference
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param(stochastic_round_cpp, marks=needs_cpp), stochastic_round_reference]


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return Philox4x32-10 of counters [N, 4] as uint32 [N, 4]."""
    x = [column.astype(np.uint64) for column in counters.T]
    low, (key0, key1) = np.uint64(0xFFFFFFFF), map(np.uint64, key)
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> np.uint64(32)) ^ x[1] ^ key0, b & low, (a >> np.uint64(32)) ^ x[3] ^ key1, a & low]
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & low, (key1 + np.uint64(0xBB67AE85)) & low
    return np.stack(x, axis=1).astype("<u4")


def round_in_numpy(values: np.ndarray, position: DrawPosition) -> np.ndarray:
    """Return the bits of the rounded values."""
    local = np.arange(values.size)
    index = position.first + local // position.width * position.stride + local % position.width
    counters = np.stack([index // 8 % 2**32, index // 8 // 2**32, 0 * index + position.step, 0 * index], axis=1)
    halves = philox(counters, (position.seed, position.tensor)).view("<u2")
    draws = halves[local, index % 8].astype(np.uint32)
    return ((values.reshape(-1).view(np.uint32) + draws) >> np.uint32(16)).astype(np.uint16).reshape(values.shape)


def in_one_row(size: int, **changes: int) -> DrawPosition:
    return DrawPosition(**{"seed": 1, "tensor": 2, "step": 3, "first": 0, "width": size, "stride": size, **changes})


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, words):
    counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert philox(np.array([counter]), tuple(key)).tolist() == [words]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "position",
    [
        in_one_row(10_000),
        DrawPosition(2**32 - 1, 2**32 - 1, 2**32 - 1, 5, 10_000, 10_000),
        in_one_row(10_000, first=2**37 - 77),
        in_one_row(10_000, first=13, width=37, stride=91),
    ],
)
def test_stochastic_round_adds_draws_to_the_bits(backend, position):
    values = normal(1, 100, 100) * np.float32(10.0) ** np.arange(-20, 30, 0.5, dtype=np.float32)
    rounded = backend(paddle.to_tensor(values), position)
    assert rounded.dtype == paddle.bfloat16
    np.testing.assert_array_equal(rounded.numpy(), round_in_numpy(values, position))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_round_is_unbiased(backend, fraction, sign):
    """Check the share of values that move away from zero: its standard error is that of a coin."""
    count, step = 1 << 16, 2.0**-7
    values = np.full(count, sign * (1.0 + fraction * step), np.float32)
    rounded = backend(paddle.to_tensor(values), in_one_row(count)).astype("float32").numpy()
    assert set(np.unique(rounded)) == {sign, sign * (1.0 + step)}
    share = (np.abs(rounded) > 1.0).mean()
    assert abs(share - fraction) < 4 * np.sqrt(fraction * (1 - fraction) / count)


@needs_cpp
@pytest.mark.parametrize("change", ["seed", "tensor", "step"])
def test_stochastic_round_draws_of_other_positions_are_independent(change):
    count = 1 << 14
    values = paddle.full([count], 1.0 + 2.0**-8)
    signs = []
    for number in (7, 8):
        rounded = stochastic_round_cpp(values, in_one_row(count, **{change: number})).astype("float32").numpy()
        signs.append(np.sign(rounded - 1.0 - 2.0**-8))
    assert set(signs[0]) == {-1.0, 1.0} and abs(np.mean(signs[0] * signs[1])) < 4 / np.sqrt(count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_round_keeps_bfloat16_infinity_and_nan(backend):
    values = np.array([0.0, -0.0, 1.5, -3e38, np.inf, -np.inf, np.nan], np.float32)
    values[3] = (values[3:4].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)[0]
    values = np.tile(values, 20)
    rounded = backend(paddle.to_tensor(values), in_one_row(values.size)).astype("float32").numpy()
    np.testing.assert_array_equal(rounded, values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_round_of_no_values_returns_none(backend):
    assert backend(paddle.zeros([0, 3]), in_one_row(1)).shape == [0, 3]


@needs_cpp
def test_stochastic_round_cpp_with_other_thread_counts_gives_same_bits():
    values, position = paddle.to_tensor(normal(2, 1000, 77)), in_one_row(0, first=9, width=77, stride=100)
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        results.append(stochastic_round_cpp(values, position).numpy())
    set_threads(threads_per_process())
    np.testing.assert_array_equal(*results)
