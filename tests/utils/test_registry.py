"""Registry of named entries, and suggestions for misspelled names."""

from __future__ import annotations

import pytest

from paddlenlp_ext.utils.registry import Registry
from paddlenlp_ext.utils.suggest import did_you_mean, nearest


def test_nearest_suggests_close_words():
    assert nearest("lora_rnak", ["lora_rank", "lora_path"]) == "lora_rank"
    assert nearest("zzz", ["lora_rank"]) is None
    assert nearest("dora", ["sora", "lora", "use_dora"]) == "use_dora"
    assert did_you_mean("lora_rnak", ["lora_rank"]) == "; did you mean 'lora_rank'?"
    assert did_you_mean("zzz", ["lora_rank"]) == "."


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
