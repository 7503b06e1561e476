"""Describe the results of a run, with commands that use them; the commands can be pasted into a shell."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_FILES = ("adapter_model.safetensors", "metrics.jsonl", "report.html", "loss.png")


def next_steps(folder: Path, kind: str) -> str:
    """Describe the results in a folder, and the next commands.

    Args:
        folder: the run's output_dir, or the folder of a merged model.
        kind: "adapter", "unmergeable" (an adapter that cannot be merged), "model" or "reward model".
    """
    run = str(folder)
    chat, serve = ["chat", run], ["serve", run]
    merge = ["merge", run, "-o", f"{run}-merged"]
    export = ["export", "gguf", run, "-o", f"{run}.gguf"]
    commands = {
        "adapter": [chat, merge, export, serve],
        "unmergeable": [chat, serve],
        "model": [chat, export, serve],
        "reward model": [["predict", run, "-d", "ROWS.jsonl"]],
    }[kind]
    found = ", ".join(name for name in _FILES if (folder / name).is_file())
    lines = [f"Results: {run}{f' ({found})' if found else ''}", "Next:"]
    return "\n".join([*lines, *(f"  {quote([*program(), *command])}" for command in commands)])


def program() -> list[str]:
    """Return the words that start `pnx` in this shell: its name, its path, or `python -m paddlenlp_ext`."""
    if shutil.which("pnx") is not None:
        return ["pnx"]
    beside = Path(sys.executable).with_name("pnx")  # a virtual environment that is not activated
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "paddlenlp_ext"]


def quote(words: Sequence[str]) -> str:
    """Join words into a command line for this system's shell."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)
