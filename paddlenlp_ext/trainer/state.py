"""What a run knows of itself besides weights and optimizer: everything in it is JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.data.sampler import StepBatch


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, measured.

    Attributes:
        loss: sum over the learned tokens of the whole window, divided by their number.
        grad_norm: of all gradients together, before clipping.
        num_tokens: tokens in the window without padding.
        num_learned: tokens of the window that the loss counts.
        num_rows: dataset rows in the window.
        seconds: wall-clock time from the window's start to the parameters' update.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    num_rows: int
    seconds: float


@dataclass
class Interval:
    """Sums over the optimizer steps since the last logging step."""

    num_steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    num_tokens: int = 0
    num_target_tokens: int = 0
    seconds: float = 0.0

    def add(self, report: StepReport) -> None:
        """Count one more step."""
        self.num_steps += 1
        self.loss += report.loss
        self.grad_norm = report.grad_norm
        self.num_tokens += report.num_tokens
        self.num_target_tokens += report.num_target_tokens
        self.seconds += report.seconds


@dataclass
class TrainerState:
    """Where a run stands, as saved in trainer_state.json.

    Attributes:
        step: optimizer steps made.
        total_steps: optimizer steps of the whole run.
        epoch: epochs seen, a fraction within an epoch.
        epoch_index, window_index: the data position: the next window to fetch.
        num_tokens, num_learned, num_rows: counted over all steps.
        train_loss_sum: sum of the steps' losses (their mean is `train_loss`).
        train_seconds: time spent in steps, over all runs that led here.
        best_name, best_metric, best_step: the best evaluation so far: by which metric, its value, after which step.
        evaluation_due: a stop came before this step's evaluation; the resumed run begins with it.
        data_order: what decides the order of the data; a resumed run must agree (data_order.py).
        interval: what the next log entry has gathered so far.
        log_history: every entry logged, in order.
    """

    step: int = 0
    total_steps: int = 0
    epoch: float = 0.0
    epoch_index: int = 0
    window_index: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_rows: int = 0
    train_loss_sum: float = 0.0
    train_seconds: float = 0.0
    best_name: str | None = None
    best_metric: float | None = None
    best_step: int | None = None
    evaluation_due: bool = False
    data_order: dict[str, Any] = field(default_factory=dict)
    interval: Interval = field(default_factory=Interval)
    log_history: list[dict[str, Any]] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Count one more optimizer step (the data position is set by the trainer)."""
        self.step += 1
        self.num_tokens += report.num_tokens
        self.num_target_tokens += report.num_target_tokens
        self.num_rows += report.num_rows
        self.train_loss_sum += report.loss
        self.train_seconds += report.seconds
        self.interval.add(report)

    def move_to(self, window: StepBatch) -> None:
        """Set the data position to after `window`."""
        self.epoch = window.epoch + window.end_fraction
        self.epoch_index = window.epoch + (1 if window.is_last else 0)
        self.window_index = 0 if window.is_last else window.index + 1

    def forget_best(self) -> None:
        """No evaluation counts as the best so far."""
        self.best_name = self.best_metric = self.best_step = None

    def next_log_entry(self, learning_rate: float) -> dict[str, Any]:
        """The entry for the steps since the last one, which are then forgotten; `loss` is the mean of theirs."""
        interval, self.interval = self.interval, Interval()
        assert interval.num_steps > 0, "no step since the last log entry"
        seconds = max(interval.seconds, 1e-9)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": interval.loss / interval.num_steps,
            "learning_rate": learning_rate,
            "grad_norm": interval.grad_norm,
            "tokens_per_second": interval.num_tokens / seconds,
            "learned_tokens_per_second": interval.num_target_tokens / seconds,
            "num_tokens": self.num_tokens,
            "num_learned_tokens": self.num_target_tokens,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; floats keep all their digits."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainerState:
        """The inverse of `to_dict`. Unknown keys are refused: they come from another version."""
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"trainer_state.json holds {', '.join(unknown)}, unknown to this version: it can't resume")
        return cls(**{**values, "interval": Interval(**values.get("interval", {}))})
