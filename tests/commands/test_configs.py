"""Command `pnx configs`: find, list and copy shipped configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext.commands.configs import find_configs, run, table
from paddlenlp_ext.config.help_text import WIDTH
from tests.common.scripts import LLM


def test_find_configs_finds_words_in_path_method_model_and_keys():
    assert {config.method for config in find_configs(["qlora"])} == {"qlora"}
    assert {config.command for config in find_configs(["reward", "llama"])} == {"reward"}
    assert [config.name for config in find_configs(["smollm2/lora_argument"])] == ["smollm2/lora_argument.json"]
    assert all("gptq_step" in config.settings for config in find_configs(["gptq_step"]))
    with pytest.raises(ValueError, match="no file has 'xyzzy'"):
        find_configs(["qwen", "xyzzy"])


def test_table_shows_the_settings_that_differ_in_narrow_lines():
    lines = table(find_configs(["smollm2"])).splitlines()
    assert max(map(len, lines)) <= WIDTH
    place = next(number for number, line in enumerate(lines) if line.startswith("smollm2/lora_argument.json "))
    assert lines[place].split()[1:] == ["lora", "smollm2-135m-instruct"]
    assert "lora_rank: 16" in lines[place + 1] and "do_train" not in lines[place + 1]
    (everything,) = {line for line in table(find_configs([])).splitlines() if "add words" in line}
    assert "lora_rank" not in everything


def test_run_with_copy_writes_one_file_and_never_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    original = json.loads((LLM / "config" / "smollm2" / "lora_argument.json").read_text())
    run(["smollm2/lora_argument", "--copy"])
    run(["smollm2/lora_argument", "--copy", "run.json"])
    for name in ("smollm2_lora.json", "run.json"):
        assert json.loads((tmp_path / name).read_text()) == original
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(ValueError, match="the file exists"):
        run(["smollm2/lora_argument", "--copy", "run.json"])
    assert (tmp_path / "run.json").read_text() == "mine"
    with pytest.raises(ValueError, match="is not a folder"):
        run(["smollm2/lora_argument", "--copy", "none/run.json"])
    with pytest.raises(ValueError, match="write the path of one"):
        run(["smollm2", "--copy"])
