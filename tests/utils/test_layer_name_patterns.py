"""Suffixes of dotted names."""

from __future__ import annotations

import pytest

from paddlenlp_ext.utils.layer_name_patterns import has_suffix


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("weight", True),
        ("gate.weight", True),
        ("layers.0.mlp.gate.weight", True),
        ("ate.weight", False),
        (".weight", False),
        ("mlp.gate", False),
        ("", False),
    ],
)
def test_has_suffix_compares_whole_components(suffix, expected):
    assert has_suffix("layers.0.mlp.gate.weight", suffix) == expected
