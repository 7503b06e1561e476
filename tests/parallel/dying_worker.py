"""Training run in which one process ends, is slow or finds NaN in an optimizer step, as FOLDER/death.json says."""

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
from paddlenlp_ext.utils.run_command import run_command
from tests.common.parallel import Case, run_case

GLOO_TIMEOUT = 30.0


def die_in_step(folder: Path, step: int, dying_rank: int, how: str) -> None:
    """End or disturb one process before it sums the gradients of step number `step`, counted from 1."""
    sum_gradients: Callable[..., None] = DistributedProcesses.sum_gradients
    steps = 0

    def sum_or_die(process_group, parameters) -> None:
        nonlocal steps
        parameters = list(parameters)
        steps += 1
        if rank() == dying_rank and steps == step:
            (folder / "died_at").write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise RuntimeError("this process dies in the test")
            if how == "sleeps":
                time.sleep(GLOO_TIMEOUT + 3.0)
            if how == "gradient":
                gradient = next(parameter.grad for parameter in parameters if parameter.grad is not None)
                gradient.set_value(gradient * float("nan"))
        sum_gradients(process_group, parameters)

    norm: Callable[..., float] = DistributedProcesses.norm

    def norm_or_nan(process_group, parameters) -> float:
        value = norm(process_group, parameters)
        return float("nan") if rank() == dying_rank and steps == step and how == "norm" else value

    DistributedProcesses.sum_gradients = sum_or_die
    DistributedProcesses.norm = norm_or_nan


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    die_in_step(folder, **json.loads((folder / "death.json").read_text()))
    run_case(Case(**json.loads((folder / "case.json").read_text())), folder)


run_command(main)
