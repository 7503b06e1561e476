"""Run the first two steps of a run, and estimate the time of the whole run; output_dir is not written."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.utils.distributed_env import require_single_process

_NUM_STEPS = 2


class _Clock(Callback):
    """Record when training begins and when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, state: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, state: Any, report: Any) -> None:
        self.times.append(time.perf_counter())


def time_steps(config: RunConfig) -> str:
    """Train two steps in a temporary folder, and describe the time of a step and of the run.

    The second step is measured, because the first step also allocates memory. The model is not evaluated or saved.

    Raises:
        ValueError: the model or data cannot be used, the run does not train, or a launcher started several processes.
    """
    require_single_process("the time of steps")
    data = load_data(config)
    if data.train_rows is None:
        raise ValueError("--time: the run does not train; set do_train: true")
    total = build_data_order(config, data.train_rows, 1).total_steps
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="pnx-plan-") as folder:
        train = replace(
            config.train,
            output_dir=folder,
            max_steps=_NUM_STEPS,
            do_eval=False,
            evaluation_strategy="no",
            eval_on_start=False,
            save_strategy="no",
            load_best_model_at_end=False,
            resume_from_checkpoint=None,
            report_to=(),
            push_to_hub=False,
            callbacks=(),
        )
        build_trainer(replace(config, train=train), data, [clock]).train()
    seconds = clock.times[-1] - clock.times[-2]
    return (
        f"A step takes {seconds:.2f} s. {total:,} steps take about {describe_seconds(seconds * total)}, without "
        "evaluations and checkpoints."
    )


def describe_seconds(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, such as "12 min"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
