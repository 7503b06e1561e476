"""Registry of named entries."""

from __future__ import annotations

import pytest

from paddlenlp_ext.utils.registry import Registry


def test_registry_with_an_unknown_name_lists_the_known():
    registry: Registry[int] = Registry("colour", "paddlenlp_ext.utils")
    registry.register("red", "rouge")(1)
    assert registry.get("red") == registry.get("rouge") == 1
    assert registry.names() == ["red", "rouge"]
    with pytest.raises(ValueError, match="unknown colour 'rde'; did you mean 'red'"):
        registry.get("rde")
    with pytest.raises(ValueError, match=r"unknown colour 'blue'\. Known: red, rouge\."):
        registry.get("blue")
    with pytest.raises(AssertionError):
        registry.register("red")(2)
