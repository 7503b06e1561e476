"""Help texts of the programs: lines, sections, and the keys that they list."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from paddlenlp_ext.config.help_text import BASIC_KEYS, USAGE, WIDTH, help_text, read_keys
from paddlenlp_ext.config.programs import PROGRAMS, Program
from tests.common.scripts import LLM

BY_NAME = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def listed(text: str) -> list[str]:
    return re.findall(r"^  --(\w+)", text, re.MULTILINE)


@BY_NAME
def test_help_text_lists_each_key_once_in_narrow_lines(program: Program):
    for with_idle in (False, True):
        text = help_text(read_keys(program.name), USAGE.format(program.script), with_idle)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert len(listed(text)) == len(set(listed(text)))
        assert not any(line.endswith(" ") for line in text.splitlines())


@BY_NAME
def test_help_text_begins_with_the_basic_keys_that_the_program_reads(program: Program):
    text = help_text(read_keys(program.name), USAGE.format(program.script))
    basic = listed(text.partition("\n\nmodel:")[0])
    assert basic == [key for key in BASIC_KEYS if key in listed(text)] and len(basic) > 10
    assert set(BASIC_KEYS) <= {key for program in PROGRAMS for key in read_keys(program.name)}


@BY_NAME
def test_help_text_with_idle_keys_lists_all_keys(program: Program):
    keys = read_keys(program.name)
    idle = {key for key, entry in keys.items() if entry.get("x-idle")}
    usage = USAGE.format(program.script)
    assert set(listed(help_text(keys, usage))) == keys.keys() - idle
    assert set(listed(help_text(keys, usage, with_idle=True))) == keys.keys()
    assert {"dpo": "lazy", "reward": "top_k", "quantize": "neftune", "sft": "unified_checkpoint", "grpo": "lazy"}[
        program.name
    ] in idle


def test_print_requested_help_needs_no_paddle():
    code = "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit: print(sorted({'paddle', 'transformers', 'yaml'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, str(LLM / "run_dpo.py")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=LLM.parent, check=True)
    assert result.stdout.startswith("usage: run_dpo.py CONFIG") and result.stdout.splitlines()[-1] == "[]"
