"""The completion script, run by bash."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from paddlenlp_ext.commands import pnx
from paddlenlp_ext.commands.completion import completion_script, options_of_command

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script() -> str:
    return completion_script()


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["sf"], "sft"),
        (["export", "g"], "gguf"),
        (["export", "gguf", "--outt"], "--outtype"),
        (["merge", "--model_n"], "--model_name_or_path"),
        (["plan", "dp"], "dpo"),
        (["completion", "z"], "zsh"),
        (["chat", "my_"], "my_run"),
    ],
)
def test_completion_of_a_word_is_the_only_match(line, expected, script, tmp_path):
    (tmp_path / "my_run").mkdir()
    words = " ".join(["pnx", *line])
    code = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(line)}; _pnx; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([str(BASH), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_options_of_a_command_are_those_of_its_help():
    assert {"-m", "-o", "--model", "--outtype", "--lora_path"} <= set(options_of_command("export gguf"))


def test_completion_with_an_unknown_shell_is_an_error():
    with pytest.raises(ValueError, match="no script for 'fish'"):
        pnx.run(["completion", "fish"])
