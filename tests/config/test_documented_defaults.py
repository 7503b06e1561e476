"""Defaults that differ from PaddleNLP's documentation: exactly those of the table in docs/configuration.md."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import ROOT, load_script
from tests.config.documented_defaults import ARGUMENT_CLASSES, FINE_TUNING_PAGE


def test_defaults_differ_from_the_documented_ones_only_where_the_page_says_so():
    known = known_keys(peft_methods())
    documented: dict[str, Any] = {**ARGUMENT_CLASSES, **FINE_TUNING_PAGE}
    here = {key: known.options[known.keys[key]].default for key in documented}
    different = {key: value for key, value in documented.items() if here[key] != value}
    table = load_script(ROOT / "docs" / "make_configuration.py").DIFFERENT_DEFAULTS
    assert {key: value for key, (value, _) in table.items()} == different
    assert all(reason and not reason.endswith(".") for _, reason in table.values())


def test_defaults_of_the_page_are_those_of_a_run():
    """Expect the documented defaults from the dataclasses too, which Python code uses without a file."""
    config = peft_methods()
    assert config["vera"]().rank == FINE_TUNING_PAGE["vera_rank"]
    assert config["lora"]().rank == FINE_TUNING_PAGE["lora_rank"]
    assert config["lokr"]().rank == FINE_TUNING_PAGE["lokr_rank"]
