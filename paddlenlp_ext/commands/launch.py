"""Start a training command in several processes on this machine, with Paddle's launcher (`--nproc N`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paddlenlp_ext._runtime import require_installed_paddle, threads_per_process
from paddlenlp_ext.commands.arguments import with_long_names
from paddlenlp_ext.commands.train import with_data_files
from paddlenlp_ext.config.requested_value import requested_value
from paddlenlp_ext.devices import AUTO

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


def requested_device(argv: Sequence[str]) -> str:
    """Return the `device` of a training command and its configuration files; "auto" if none is written."""
    return requested_value(with_data_files(with_long_names(argv)), "device") or AUTO


def launch(command: str, num_processes: int, argv: Sequence[str], on_cpu: bool) -> NoReturn:
    """Replace this process with Paddle's launcher; on Windows, run the launcher and exit with its code.

    On the CPU, the cores are divided evenly among the processes, unless the user has set OMP_NUM_THREADS.

    Args:
        command: name of the command, such as "sft".
        num_processes: number of processes. The launcher gives each process one GPU or other device.
        argv: the command line after the command.
        on_cpu: whether the processes run on the CPU, and communicate over gloo instead of the library of the device.
    """
    require_installed_paddle()
    if on_cpu:  # otherwise, Paddle, which the launcher imports, would set OMP_NUM_THREADS to 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads_per_process() // num_processes)))
    words = launch_words(command, num_processes, argv, on_cpu)
    if sys.platform == "win32":
        sys.exit(subprocess.run(words, check=False).returncode)
    os.execv(sys.executable, words)


def launch_words(command: str, num_processes: int, argv: Sequence[str], on_cpu: bool) -> list[str]:
    """Return the command line of Paddle's launcher."""
    backend = ["--backend", "gloo"] if on_cpu else []
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(num_processes), *backend]
    return [*launcher, str(_SCRIPT), command, *argv]
