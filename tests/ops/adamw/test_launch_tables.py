"""Groups of the tensors of a launch, and tables against loops in Python."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.adamw.launch_tables import TableRow, TensorUpdate, block_map, group_for_launches, table_of
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition


def row(*addresses: int, size: int = 100) -> TableRow:
    return TableRow(*(*addresses, 0, 0, 0, 0, 0)[:5], size)


def test_block_map_covers_each_tensor_in_order():
    sizes, span = [1, 64, 65, 300], 64
    expected = [(tensor, part) for tensor, size in enumerate(sizes) for part in range(math.ceil(size / span))]
    blocks = block_map(sizes, span)
    assert blocks.dtype == np.int32 and [tuple(each) for each in blocks] == expected


@pytest.mark.parametrize(("addresses", "size", "divisor"), [((16, 32), 48, 16), ((16, 32), 100, 1), ((16, 8), 48, 1)])
def test_table_row_alignment_divides_addresses_and_size(addresses, size, divisor):
    assert row(*addresses, size=size).alignment == divisor


def test_table_has_the_key_of_the_draws_as_64_bits():
    position = DrawPosition(seed=7, tensor=2**32 - 2, step=5, first=8, width=16, stride=64)
    table = table_of([row(16), row(32).with_draws(position)])
    assert table.dtype == np.int64 and table.shape == (2, 13)
    assert table[1, 6:7].view(np.uint64)[0] == 7 | (2**32 - 2) << 32
    assert table[1, 7:11].tolist() == [5, 8, 16, 64]


@pytest.mark.parametrize(
    ("first", "width", "stride", "expected"),
    [(0, 100, 100, True), (3, 100, 100, False), (8, 16, 64, True), (8, 12, 64, False), (8, 16, 60, False)],
)
def test_table_row_has_groups_if_neighbours_share_counters(first, width, stride, expected):
    assert row().with_draws(DrawPosition(0, 0, 0, first, width, stride)).has_groups is expected


def test_group_for_launches_joins_non_empty_tensors_of_equal_dtype_rounding_and_alignment():
    single, half = (paddle.zeros([1], dtype) for dtype in ("float32", "bfloat16"))
    kinds = [
        (single, row(16, size=16), "none"),
        (half, row(16, size=16), "single"),
        (single, row(32, size=32), "none"),
        (single, row(8, size=16), "none"),
        (half, row(16, size=16), "groups"),
        (single, row(16, size=0), "none"),
    ]
    updates = [TensorUpdate(weight, weight, own, (), rounding) for weight, own, rounding in kinds]
    groups = [
        ([next(index for index, update in enumerate(updates) if update is each) for each in group], tuple(own.values()))
        for group, own in group_for_launches(updates)
    ]
    assert groups == [
        ([0, 2], ("float32", "float32", "none", 16)),
        ([1], ("bfloat16", "bfloat16", "single", 16)),
        ([3], ("float32", "float32", "none", 1)),
        ([4], ("bfloat16", "bfloat16", "groups", 16)),
    ]
