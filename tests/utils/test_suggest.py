"""Suggestions for misspelled names."""

from __future__ import annotations

from paddlenlp_ext.utils.suggest import did_you_mean, nearest


def test_nearest_suggests_close_words():
    assert nearest("lora_rnak", ["lora_rank", "lora_path"]) == "lora_rank"
    assert nearest("zzz", ["lora_rank"]) is None
    assert nearest("dora", ["sora", "lora", "use_dora"]) == "use_dora"
    assert did_you_mean("lora_rnak", ["lora_rank"]) == "; did you mean 'lora_rank'?"
    assert did_you_mean("zzz", ["lora_rank"]) == "."
