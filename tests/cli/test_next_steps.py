"""The commands that a run prints at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paddlenlp_ext.cli import next_steps as module
from paddlenlp_ext.cli.next_steps import next_steps
from paddlenlp_ext.commands.pnx import split_command


@pytest.mark.parametrize("kind", ["adapter", "unmergeable", "model", "reward model"])
def test_next_steps_are_commands_of_pnx_with_quoted_paths(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "program", lambda: ["pnx"])
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "loss.png").touch()
    first, heading, *lines = next_steps(folder, kind).splitlines()
    assert (first, heading) == (f"Results: {folder} (loss.png)", "Next:")
    for line in lines:
        program, *words = shlex.split(line)
        name, arguments = split_command(words)
        assert program == "pnx" and arguments[0] == str(folder)
        assert kind != "unmergeable" or name in ("chat", "serve")


def test_program_without_pnx_in_path_is_beside_python(tmp_path, monkeypatch):
    python, pnx = tmp_path / "python", tmp_path / "pnx"
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setenv("PATH", "")
    assert module.program() == [str(python), "-m", "paddlenlp_ext"]
    pnx.touch()
    assert module.program() == [str(pnx)]
    pnx.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.program() == ["pnx"]


def test_quote_on_windows_uses_double_quotes(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    assert module.quote(["pnx", "chat", str(Path("my run"))]) == 'pnx chat "my run"'
