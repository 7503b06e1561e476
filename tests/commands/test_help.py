"""Command `pnx help`: keys by name, by the names of other toolkits, and by words."""

from __future__ import annotations

import pytest

from paddlenlp_ext.commands.help import PROGRAMS, explain, run
from paddlenlp_ext.config.help_text import WIDTH, read_aliases, read_keys
from paddlenlp_ext.config.programs import PROGRAMS as ALL


def test_explain_of_a_key_tells_type_default_readers_and_page():
    text = explain(["lora_rank"])
    for fact in ("a whole number: at least 1", "default       8", "pnx dpo (llm/run_dpo.py)", "lora: true", "lora_r"):
        assert fact in text
    assert "docs/configuration.md#lora" in text.splitlines()[-1]


def test_explain_of_a_key_tells_defaults_that_differ_and_keys_of_the_same_rules():
    text = explain(["--src-length"])
    assert "1024 (sft), 2048 (dpo)" in text and "checked with  max_length" in text
    assert "pnx sft" in (lazy := explain(["lazy"])) and "pnx dpo" not in lazy


def test_explain_of_a_toolkit_key_tells_what_to_set():
    assert explain(["cutoff_len"]).startswith("cutoff_len is another name of max_length\n")
    assert 'true: weight_quantize_algo: "nf4"' in explain(["load_in_4bit"])


def test_explain_states_when_a_key_has_no_effect_and_with_which_keys_it_is_checked():
    assert "no effect if  push_to_hub is false" in explain(["hub_model_id"])
    assert "eval_with_do_generation is false; top_k: 1 always takes" in explain(["temperature"])
    assert "checked with  do_train" in explain(["push_to_hub"])
    assert "no effect if" not in explain(["learning_rate"])


def test_explain_fits_the_terminal_for_every_key():
    for key in [*read_keys("dpo"), *read_aliases("dpo")]:
        assert max(map(len, explain([key]).splitlines())) <= max(WIDTH, len(key) + 80), key


def test_explain_of_words_lists_keys_with_all_words_and_no_idle_ones():
    found = explain(["Learning", "rate"])
    assert found.startswith("  learning_rate ") and "lora_plus_scale" in found and "weight_decay" not in found
    assert "weight_decay" not in explain(["checkpoint"]) and "unified_checkpoint" not in explain(["checkpoint"])
    assert "  optim " in explain(["paged_adamw_8bit"]), "words are also looked for in values"
    assert "  unified_checkpoint" in explain(["unified"], with_idle=True)


def test_explain_of_an_unknown_key_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'lora_rank'"):
        explain(["lora_rnk"])


def test_programs_are_the_programs_of_the_configuration():
    assert {f"{script}.py": name for name, script in PROGRAMS.items()} == {each.script: each.name for each in ALL}


def test_run_with_a_command_prints_its_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run(["data", "show"])
    assert capsys.readouterr().out.startswith("usage: pnx data show")
