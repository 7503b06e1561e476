"""Run the commands of docs/start and docs/tutorials as written, with a tiny model and few rows in place of theirs.

A page is run from top to bottom in an empty folder. A block after a line "`NAME`:" is written to the file NAME, a bash
block is run line by line, a python block is executed, and blocks of other languages are output. Commands of `pnx` run
in this process, except for servers and for runs in several processes.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paddlenlp_ext.commands import pnx
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.trainer import trainer
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.stopping.signals import TrainingStopped
from tests.common.models import write_stand_ins
from tests.common.scripts import ROOT, load_script, script_environment
from tests.common.server_process import server_process

pytestmark = pytest.mark.layouts

DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "start").glob("*.md"), *(DOCS / "tutorials").glob("*.md")])
BLOCK = re.compile(r"(?:^`(?P<file>[^`\n]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("python3 -m venv", "source ", "pip install", "pnx doctor", "ollama ")
"""Beginnings of commands that install something or belong to other programs; tests/doctor has the self-check."""
QUESTIONS = "Where is order 1007?\n/exit\n"
INTERRUPTED = "Ctrl-C once"
"""Words before a block whose first run receives SIGINT after some steps."""


@pytest.fixture(scope="session")
def replacements(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save models and rows in place of those in the pages; see `write_stand_ins`."""
    return write_stand_ins(tmp_path_factory.mktemp("tutorials"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_runs_as_written(page, replacements, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llm").symlink_to(ROOT / "llm")
    text = page.read_text(encoding="utf-8")
    end = 0
    for block in BLOCK.finditer(text):
        before, end = text[end : block.start()], block.end()
        content = block["text"]
        for pattern, path in replacements.items():
            content = re.sub(pattern, path, content)
        if bf16.unavailable_reason() is not None:
            content = re.sub(r' *"(bf16|fp16_opt_level)": .*\n|--bf16 --fp16_opt_level O2', "", content)
        if block["file"]:
            Path(block["file"]).write_text(content, encoding="utf-8")
        elif block["language"] == "python":
            exec(compile(content, str(page), "exec"), {"__name__": "__main__"})
        elif block["language"] == "bash":
            if INTERRUPTED in before:
                with interrupted_after(2, monkeypatch):
                    run_block(content, monkeypatch)
            else:
                run_block(content, monkeypatch)


def run_block(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a block, in order. Commands of a block after `pnx serve` are in the next block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or line.startswith(NOT_RUN):
            continue
        if words[0] == "pnx" and "--nproc" in words:
            run_process([sys.executable, "-m", "paddlenlp_ext", *words[1:]])
        elif words[:2] == ["pnx", "serve"]:
            SERVED.append(words[2])
        elif words[0] == "curl":
            with server_process(SERVED.pop()) as (_, port):
                reply = run_process([word.replace(":8000", f":{port}") for word in ["curl", "--silent", *words[1:]]])
            assert json.loads(reply)["choices"], reply
        elif words[0] == "pnx":
            monkeypatch.setattr("sys.stdin", io.StringIO(QUESTIONS))
            pnx.run(words[1:])
        elif words[0] == "python" and words[1].endswith(".py"):
            load_script(Path(words[1])).main(words[2:])
        else:
            raise AssertionError(f"no rule runs this command: {line}")


SERVED: list[str] = []
"""Folder of the model that a page serves and then asks."""


def run_process(words: list[str]) -> str:
    environment = script_environment(OMP_NUM_THREADS="1")
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Interrupt(Callback):
    """Callback that sends SIGINT, as Ctrl-C does, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state, report):
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def interrupted_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt the training run of the block, and check that it stops."""
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "load_callbacks", lambda paths: [Interrupt(step)])
        with pytest.raises(TrainingStopped, match=f"SIGINT after step {step}"):
            yield
