"""Training run in which one process ends in the middle of an optimizer step, as FOLDER/death.json says."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext.parallel.process_group import DistributedProcesses
from paddlenlp_ext.utils.distributed_env import rank
from paddlenlp_ext.utils.process import run_command
from tests.common.parallel import Case, run_case


def die_in_step(folder: Path, step: int, dying_rank: int, how: str) -> None:
    """End one process right before it sums the gradients of step number `step`, counted from 1."""
    sum_gradients: Callable[..., None] = DistributedProcesses.sum_gradients
    steps = 0

    def sum_or_die(process_group, parameters) -> None:
        nonlocal steps
        steps += 1
        if rank() == dying_rank and steps == step:
            (folder / "died_at").write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this process dies in the test")
        sum_gradients(process_group, parameters)

    DistributedProcesses.sum_gradients = sum_or_die


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    die_in_step(folder, **json.loads((folder / "death.json").read_text()))
    run_case(Case(**json.loads((folder / "case.json").read_text())), folder)


run_command(main)
