"""Progress of a run: a bar in a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState
from paddlenlp_ext.utils.logging import get_logger

_SHOWN = (
    *("rewards/margins", "rewards/accuracies", "expert_imbalance"),
    *("reward", "frac_reward_zero_std", "completions/mean_length", "kl", "entropy"),
)
"""Metrics that a log line of training shows."""
_HIDDEN = ("_second", "_runtime", "_num_rows", "_num_target_tokens")  # endings of metric names that are not shown
_SMOOTHING = 0.9  # weight of the previous rates in the bar's moving averages


def build_progress(disable_tqdm: bool) -> Callback:
    """Return a `ProgressBar` if standard error is a terminal and `disable_tqdm` is false, else `LogLines`."""
    return LogLines() if disable_tqdm or not sys.stderr.isatty() else ProgressBar()


def describe(entry: dict[str, Any], total_steps: int) -> str:
    """Format a training or evaluation log entry as one line of text."""
    head = f"step {entry['step']}/{total_steps} (epoch {entry['epoch']:.2f})"
    if "loss" not in entry:
        return f"{head}: evaluation: {describe_metrics(entry)}"
    rewards = "".join(f", {name} {entry[name]:.3f}" for name in _SHOWN if name in entry)
    return (
        f"{head}: loss {entry['loss']:.4f}{rewards}, lr {entry['learning_rate']:.3g}, "
        f"grad norm {entry['grad_norm']:.3f}, {entry['tokens_per_second']:,.0f} tokens/s "
        f"({entry['target_tokens_per_second']:,.0f} target)"
    )


def describe_metrics(metrics: dict[str, Any]) -> str:
    """Format the metrics of an evaluation as one line of text, without times and counts."""
    shown = {
        key.removeprefix("eval_").removeprefix("test_"): value
        for key, value in metrics.items()
        if key.startswith(("eval_", "test_")) and not key.endswith(_HIDDEN)
    }
    return ", ".join(f"{name} {value:.4f}" for name, value in shown.items())


def describe_results(results: dict[str, float]) -> str:
    """Format the results of a training run as one line of text."""
    return (
        f"{results['step']} steps, mean loss {results['train_loss']:.4f}, {_hms(results['train_runtime'])} in "
        f"optimizer steps, {results['train_tokens_per_second']:,.0f} tokens/s "
        f"({results['train_target_tokens_per_second']:,.0f} target), peak memory "
        f"{results['peak_memory_bytes'] / 2**30:.2f} GiB"
    )


class LogLines(Callback):
    """Callback that logs every log entry as one line; training entries end with the remaining time."""

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        line = describe(entry, state.total_steps)
        if "loss" in entry:
            line += f", {_hms(seconds_left(state))} left"
        get_logger(__name__).info(line)


def seconds_left(state: TrainerState) -> float:
    """Estimate the seconds for the remaining steps from the mean step time so far."""
    return (state.total_steps - state.step) * state.train_seconds / max(1, state.step)


def _hms(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class ProgressBar(Callback):
    """Progress bar: phase, step, loss, learning rate, speed in tokens and in target tokens, remaining time."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._handlers: list[tuple[logging.StreamHandler, Any]] = []
        self._rates = (0.0, 0.0)

    def on_train_begin(self, state: TrainerState) -> None:
        self._bar = Progress(
            TextColumn("{task.description}, step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("training", total=state.total_steps, completed=state.step, metrics="")
        self._bar.start()
        # The started bar replaces sys.stderr with a stream that prints above the bar, and log handlers must use this
        # stream.
        root = logging.getLogger("paddlenlp_ext")
        self._handlers = [(h, h.setStream(sys.stderr)) for h in root.handlers if type(h) is logging.StreamHandler]

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        assert self._bar is not None, "training has not begun"
        weight = _SMOOTHING if any(self._rates) else 0.0
        self._rates = (
            weight * self._rates[0] + (1 - weight) * report.num_tokens / report.seconds,
            weight * self._rates[1] + (1 - weight) * report.num_target_tokens / report.seconds,
        )
        metrics = (
            f"loss {report.loss:.4f}  lr {report.learning_rate:.2e}  "
            f"{self._rates[0]:,.0f} tok/s ({self._rates[1]:,.0f} target)"
        )
        self._bar.update(self._task, completed=state.step, metrics=metrics)

    def on_phase(self, state: TrainerState, phase: str) -> None:
        assert self._bar is not None, "training has not begun"
        self._bar.update(self._task, description=phase)

    def on_rollback(self, state: TrainerState) -> None:
        assert self._bar is not None, "training has not begun"
        self._bar.update(self._task, completed=state.step)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        if "loss" not in entry and self._bar is not None:
            self._bar.console.print(describe(entry, state.total_steps), highlight=False)

    def on_train_end(self, state: TrainerState) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler, stream in self._handlers:
            if stream is not None:
                handler.setStream(stream)
        self._handlers = []
