"""Test that weights move into huge pages without a change of address or value."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp.huge_pages import HUGE_PAGE, use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_COLLAPSE = sys.platform == "linux" and tuple(
    map(int, re.findall(r"\d+", Path("/proc/version").read_text())[:2])
) >= (6, 1)


def huge_kilobytes(address: int) -> int:
    """Return the kilobytes in huge pages of the mapping that holds an address."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(found[1], 16) <= address < int(found[2], 16)
        elif holds and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(not HAS_COLLAPSE, reason="needs Linux 6.1")
@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="huge pages are disabled")
def test_use_huge_pages_of_a_matrix_moves_it_and_keeps_address_and_values():
    matrix = paddle.arange(17 * HUGE_PAGE // 4, dtype="float32")  # too large for malloc to reuse freed memory
    address = matrix.data_ptr()
    use_huge_pages([matrix])
    assert matrix.data_ptr() == address
    assert huge_kilobytes(address) >= 16 * HUGE_PAGE // 1024
    np.testing.assert_array_equal(matrix.numpy(), np.arange(17 * HUGE_PAGE // 4, dtype=np.float32))


def test_use_huge_pages_of_parameters_without_storage_or_small_ones_leaves_them():
    with paddle.LazyGuard():
        lazy = paddle.nn.Linear(512, 512)
    bias = paddle.ones([16])
    use_huge_pages([*lazy.parameters(), bias])
    np.testing.assert_array_equal(bias.numpy(), np.ones(16, np.float32))
