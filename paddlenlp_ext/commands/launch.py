"""Start a training command in several processes on this machine, with Paddle's launcher (`--nproc N`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paddlenlp_ext._runtime import require_paddle, threads_per_process

_KEY = "--nproc"
_SCRIPT = Path(__file__).resolve().parents[1] / "__main__.py"


def take_nproc(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of processes, by default 1, and the other words of a command line.

    Raises:
        ValueError: the value of `--nproc` is missing, or is not a number above 0.
    """
    words, rest, count = list(argv), [], "1"
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name != _KEY:
            rest.append(name + equals + value)
        elif equals or words:
            count = value if equals else words.pop(0)
        else:
            raise ValueError(f"a value is missing after {_KEY}; write the number of processes")
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"{_KEY} {count!r} is not a number of processes; write a whole number of at least 1")
    return int(count), rest


def launch(command: str, num_processes: int, argv: Sequence[str], has_gpu: bool) -> NoReturn:
    """Replace this process with Paddle's launcher; on Windows, run the launcher and exit with its code.

    Without GPUs, the cores are divided evenly among the processes, unless the user has set OMP_NUM_THREADS.

    Args:
        command: name of the command, such as "sft".
        num_processes: number of processes. With GPUs, the launcher gives each process one GPU.
        argv: the command line after the command.
        has_gpu: whether there is a GPU. The processes communicate over NCCL with GPUs, and over gloo without GPUs.
    """
    require_paddle()
    if not has_gpu:  # otherwise, Paddle, which the launcher imports, would set OMP_NUM_THREADS to 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads_per_process() // num_processes)))
    words = launch_words(command, num_processes, argv, has_gpu)
    if sys.platform == "win32":
        sys.exit(subprocess.run(words, check=False).returncode)
    os.execv(sys.executable, words)


def launch_words(command: str, num_processes: int, argv: Sequence[str], has_gpu: bool) -> list[str]:
    """Return the command line of Paddle's launcher."""
    backend = [] if has_gpu else ["--backend", "gloo"]
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(num_processes), *backend]
    return [*launcher, str(_SCRIPT), command, *argv]
