"""The table of commands: help texts, unknown commands, and what the commands import."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from paddlenlp_ext.commands import pnx
from tests.common.scripts import ROOT


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        pnx.run([*command.split(), "--help"])
        raise SystemExit(0)  # help texts of groups return
    assert exit_info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_pnx_help_lists_each_command(arguments, capsys):
    pnx.run(arguments)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name, (summary, _) in pnx.COMMANDS.items():
        assert [line for line in lines if line.startswith(f"{name} ") and line.endswith(f" {summary}")]


@pytest.mark.parametrize("command", pnx.COMMANDS)
def test_command_help_has_lines_of_at_most_100_columns(command, capsys):
    text = help_of(command, capsys)
    assert len(text.splitlines()) > 3
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_pnx_help_imports_neither_paddle_nor_other_slow_packages():
    commands = ["", *pnx.COMMANDS]
    script = f"""
import sys
from paddlenlp_ext.commands import pnx
for command in {commands}:
    try:
        pnx.run([*command.split(), "--help"])
    except SystemExit:
        pass
    slow = {{"paddle", "numpy", "transformers", "rich", "matplotlib"}} & sys.modules.keys()
    assert not slow, f"pnx {{command}} --help imports {{slow}}"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "pnx has no command 'docter'; did you mean 'doctor'"),
        (["xyzzy"], "pnx has no command 'xyzzy'. `pnx --help` lists the commands"),
    ],
)
def test_pnx_with_an_unknown_command_names_the_nearest(arguments, message):
    with pytest.raises(ValueError) as error:
        pnx.run(arguments)
    assert message in str(error.value)


def test_documents_name_commands_that_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    commands = re.compile(r"(?:^ *|`|\| )pnx ([a-z][^`|#\n]*)", re.MULTILINE)
    found = [line for page in pages for line in commands.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 20
    for line in found:
        pnx.split_command(line.split())  # raises ValueError for an unknown command
