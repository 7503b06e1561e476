"""The completion script, run by bash."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddlenlp_ext.commands import pnx
from paddlenlp_ext.commands.completion import completion_script, options_of_command

BASH, ZSH = shutil.which("bash"), shutil.which("zsh")


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
        (["chat", "her"], "her run"),
    ],
)
def test_completion_of_a_word_is_the_only_match(line, expected, script, tmp_path):
    (tmp_path / "my_run").mkdir()
    (tmp_path / "her run").mkdir()
    words = " ".join(["pnx", *line])
    code = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(line)}; _pnx; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([str(BASH), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def start_zsh(home: Path) -> int:
    """Start an interactive zsh in `home`, and return the descriptor of its terminal."""
    import pty  # absent on Windows

    process, terminal = pty.fork()
    if process == 0:
        os.chdir(home)
        environment = {**os.environ, "HOME": str(home), "TERM": "dumb", "PS1": "% ", "COLUMNS": "200"}
        os.execve(str(ZSH), ["zsh", "-f", "-i"], environment)
    return terminal


def type_until(terminal: int, text: str, expected: str) -> None:
    """Type a text, and wait until the terminal shows `expected`."""
    os.write(terminal, text.encode())
    shown = ""
    while expected not in shown:
        assert select.select([terminal], [], [], 60)[0], f"after {text!r}, {expected!r} is missing in {shown!r}"
        shown += os.read(terminal, 1 << 16).decode(errors="replace")


@pytest.mark.skipif(ZSH is None or sys.platform == "win32", reason="needs zsh")
def test_completion_in_zsh_completes_commands_options_and_files(tmp_path: Path, capsys):
    pnx.run(["completion", "zsh"])
    (tmp_path / "pnx.zsh").write_text(capsys.readouterr().out)
    (tmp_path / "her run").mkdir()
    terminal = start_zsh(tmp_path)
    type_until(terminal, "source pnx.zsh && echo rea''dy\n", "ready")
    for line, completed in (
        ("pnx sf", "sft"),
        ("pnx export gguf --outt", "--outtype"),
        ("pnx sft --lora_ra", "--lora_rank"),
        ("pnx chat her", "her\\ run"),
    ):
        type_until(terminal, f"\x15{line}\t", completed)  # \x15 clears the line
    os.close(terminal)


def test_options_of_a_command_are_those_of_its_help():
    assert {"-m", "-o", "--model", "--outtype", "--lora_path"} <= set(options_of_command("export gguf"))


def test_completion_with_an_unknown_shell_is_an_error():
    with pytest.raises(ValueError, match="no script for 'fish'"):
        pnx.run(["completion", "fish"])
