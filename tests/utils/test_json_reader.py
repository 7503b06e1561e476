"""JSON with errors that name the place, on input made to be slow."""

from __future__ import annotations

import pytest

from paddlenlp_ext.utils import json_reader


def test_read_value_of_many_keys_finds_the_duplicate_with_few_comparisons():
    """Count the comparisons of keys: a search that compares all pairs needs half a million."""
    num_compared = 0

    class Key(str):
        __slots__ = ()

        def __eq__(self, other):
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(Key(f"k{index}"), 0) for index in range(1000)]
    assert len(json_reader._unique_keys(pairs)) == 1000
    with pytest.raises(json_reader._RefusedError, match=r"^duplicate key 'k999' in one object; keep one$"):
        json_reader._unique_keys([*pairs, (Key("k999"), 1)])
    assert num_compared < 10_000
