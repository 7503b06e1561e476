"""Progress of a run, saved as JSON in trainer_state.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.trainer.stability.loss_scale import LossScale

_Part = TypeVar("_Part", "Interval", LossScale)
_STORED_KEYS = {
    "num_target_tokens": "num_learned",
    "batch_index": "window_index",
    "unstable_since": "trouble_since",
    "last_unstable": "last_trouble",
}
"""Attribute name -> key in trainer_state.json, if the two differ."""


@dataclass(frozen=True)
class StepReport:
    """Measurements of one optimizer step.

    Attributes:
        loss: mean loss over the units of the global batch: target tokens, pairs or rated answers.
        grad_norm: global gradient norm before clipping.
        learning_rate: learning rate of the step.
        num_tokens: tokens of the global batch without padding.
        num_target_tokens: target tokens of the global batch.
        num_rows: dataset rows of the global batch.
        seconds: wall-clock time from collation to the update of the parameters.
        metrics: additional metrics of the objective.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    num_rows: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Interval:
    """Sums over the optimizer steps since the last log entry.

    `grad_norm` is the norm of the last step. `metrics` maps each metric to the sum and the number of its values,
    because a step may lack some metrics.
    """

    num_steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    num_tokens: int = 0
    num_target_tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        """Add one optimizer step."""
        self.num_steps += 1
        self.loss += report.loss
        self.grad_norm = report.grad_norm
        self.num_tokens += report.num_tokens
        self.num_target_tokens += report.num_target_tokens
        self.seconds += report.seconds
        for name, value in report.metrics.items():
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = [total + value, count + 1]


@dataclass
class TrainerState:
    """Progress of a run, as saved in trainer_state.json.

    Attributes:
        step: number of completed optimizer steps.
        total_steps: optimizer steps of the run.
        epoch: number of completed epochs, including the fraction of the current epoch.
        epoch_index: epoch of the next global batch.
        batch_index: index of the next global batch in its epoch.
        data_cursor: position in a stream, `next_cursor` of the last global batch; None for a stored dataset.
        num_tokens, num_target_tokens, num_rows: sums of the fields of `StepReport` over all steps.
        train_loss_sum: sum of the losses of all steps.
        train_seconds: seconds spent in optimizer steps, including steps before a resume.
        best_name: name of the metric that selects the best evaluation.
        best_metric: value of this metric in the best evaluation so far.
        best_step: step of the best evaluation so far.
        num_not_improved: number of evaluations since the metric last improved (early stopping).
        evaluation_due: whether the evaluation of this step is due and not finished; a resumed run starts with this
            evaluation.
        skipped_steps: steps whose data are skipped, ascending; steps after `step` may be listed in advance. `step`
            includes skipped steps.
        overflow_steps: steps skipped after an overflow of float16 gradients, ascending. `step` includes overflow steps.
        loss_scale: dynamic loss scale; None unless the run computes in float16.
        num_nan_steps: number of consecutive steps with a non-finite loss or gradient norm.
        recent_losses: losses of the last steps without a spike, for the running mean (`loss_spike_window`).
        unstable_since: first step of the current unstable interval (nan_and_loss_spikes.py); 0: the run is stable.
        last_unstable: last unstable step of the current unstable interval; 0: the run is stable.
        healthy_step: step of the last stable checkpoint; 0: none.
        float_layers: layers whose activations `int8_training` does not round, chosen by a measurement on the first
            micro-batch; None before the measurement.
        data_order: settings that determine the data order; a resumed run must have the same settings (data/sampler.py).
        interval: sums for the next log entry.
        log_history: all log entries in order.
    """

    step: int = 0
    total_steps: int = 0
    epoch: float = 0.0
    epoch_index: int = 0
    batch_index: int = 0
    data_cursor: dict[str, Any] | None = None
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_rows: int = 0
    train_loss_sum: float = 0.0
    train_seconds: float = 0.0
    best_name: str | None = None
    best_metric: float | None = None
    best_step: int | None = None
    num_not_improved: int = 0
    evaluation_due: bool = False
    skipped_steps: list[int] = field(default_factory=list)
    overflow_steps: list[int] = field(default_factory=list)
    loss_scale: LossScale | None = None
    num_nan_steps: int = 0
    recent_losses: list[float] = field(default_factory=list)
    unstable_since: int = 0
    last_unstable: int = 0
    healthy_step: int = 0
    float_layers: list[str] | None = None
    data_order: dict[str, Any] = field(default_factory=dict)
    interval: Interval = field(default_factory=Interval)
    log_history: list[dict[str, Any]] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Add one optimizer step; the data position does not change (see `move_to`)."""
        self.step += 1
        self.num_tokens += report.num_tokens
        self.num_target_tokens += report.num_target_tokens
        self.num_rows += report.num_rows
        self.train_loss_sum += report.loss
        self.train_seconds += report.seconds
        self.interval.add(report)

    def skip(self) -> None:
        """Count a skipped step; the data position does not change (see `move_to`)."""
        self.step += 1
        if self.step not in self.skipped_steps and self.step not in self.overflow_steps:
            self.skipped_steps.append(self.step)

    @property
    def global_step(self) -> int:
        """Return `step`; transformers uses this name."""
        return self.step

    @property
    def max_steps(self) -> int:
        """Return `total_steps`; transformers uses this name."""
        return self.total_steps

    @property
    def num_trained_steps(self) -> int:
        """Return the number of steps so far that were not skipped."""
        return self.schedule_step - sum(step <= self.step for step in self.skipped_steps)

    @property
    def schedule_step(self) -> int:
        """Return the position in the learning rate schedule: the number of steps without overflow."""
        return self.step - len(self.overflow_steps)

    def note_checkpoint(self) -> None:
        """Record the checkpoint of this step as the last stable checkpoint, unless the run is unstable."""
        if not self.unstable_since or self.step < self.unstable_since:
            self.healthy_step = self.step

    def move_to(self, step_batch: StepBatch) -> None:
        """Set the data position to the end of a global batch."""
        self.epoch = step_batch.epoch + step_batch.end_fraction
        self.epoch_index = step_batch.epoch + (1 if step_batch.is_last else 0)
        self.batch_index = 0 if step_batch.is_last else step_batch.index + 1
        self.data_cursor = step_batch.next_cursor

    def forget_best(self) -> None:
        """Reset the best evaluation."""
        self.best_name = self.best_metric = self.best_step = None
        self.num_not_improved = 0

    def next_log_entry(self, learning_rate: float) -> dict[str, Any]:
        """Return a log entry with the mean loss since the last log entry, and start a new interval."""
        interval, self.interval = self.interval, Interval()
        assert interval.num_steps > 0, "at least one step must follow the last log entry"
        seconds = max(interval.seconds, 1e-9)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": interval.loss / interval.num_steps,
            "learning_rate": learning_rate,
            "grad_norm": interval.grad_norm,
            **{name: total / count for name, (total, count) in interval.metrics.items()},
            **self.scaling_metrics(),
            "tokens_per_second": interval.num_tokens / seconds,
            "target_tokens_per_second": interval.num_target_tokens / seconds,
            "num_tokens": self.num_tokens,
            "num_target_tokens": self.num_target_tokens,
        }

    def scaling_metrics(self) -> dict[str, float]:
        """Return the current loss scale and the number of overflows of the run; empty without loss scaling."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale.scale, "num_overflow_steps": len(self.overflow_steps)}

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of trainer_state.json."""
        values = dataclasses.asdict(self)
        return _renamed({**values, "interval": _renamed(values["interval"], _STORED_KEYS)}, _STORED_KEYS)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TrainerState:
        """Build the state from the contents of trainer_state.json.

        Raises:
            ValueError: a key is unknown (another version wrote the file), or a value has the wrong type.
        """
        attributes = {key: name for name, key in _STORED_KEYS.items()}
        values = _renamed(stored, attributes)
        if unknown := sorted(set(values) - {item.name for item in dataclasses.fields(cls)}):
            raise ValueError(
                f"keys unknown to this version: {', '.join(unknown)}; resume with the version that wrote the file"
            )
        _check_types(cls(), values)
        values["interval"] = _part(Interval(), _renamed(values.get("interval", {}), attributes), "interval")
        if values.get("loss_scale") is not None:
            values["loss_scale"] = _part(LossScale(1.0), values["loss_scale"], "loss_scale")
        return cls(**values)


_OPTIONAL_TYPES = {
    "data_cursor": dict,
    "loss_scale": dict,
    "float_layers": list,
    "best_name": str,
    "best_metric": float,
    "best_step": int,
    "interval": dict,
}
"""Types of values in the file, for attributes with the default None and attributes stored as a dict."""


def _part(default: _Part, values: dict[str, Any], key: str) -> _Part:
    """Return a copy of `default` (an `Interval` or `LossScale`) with the stored values."""
    if values.keys() - {item.name for item in dataclasses.fields(default)}:
        raise ValueError(f"damaged: {key} is {values!r}")
    _check_types(default, values)
    return dataclasses.replace(default, **values)


def _check_types(default: Any, values: dict[str, Any]) -> None:
    """Check that values have the types of the attributes of `default`; an int is accepted for a float.

    Raises:
        ValueError: the type of a value is wrong.
    """
    for name, value in values.items():
        expected = _OPTIONAL_TYPES.get(name, type(getattr(default, name)))
        allowed = (float, int) if expected is float else expected
        is_none = value is None and getattr(default, name) is None
        if not is_none and (not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool)):
            raise ValueError(f"damaged: {_STORED_KEYS.get(name, name)} is {value!r}; expected {expected.__name__}")


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}
