"""Handle unstable steps: NaN or infinity (`nan_policy`), loss spikes and skipped data.

`OptimizerStep` raises `NonFiniteError` before the update if the loss or gradient norm is not finite on at least one
process. In float16, a gradient overflow lowers the loss scale and training continues, unless the loss scale is already
minimal (loss_scale.py). In all other cases, `nan_policy` decides:

    raise      the run ends with an error that names the rows of the step
    skip       the step is counted, but does not update the model
    rollback   the run returns to the last stable checkpoint, and skips the unstable steps

A run becomes unstable at a non-finite step or a loss spike, and stable again after `loss_spike_window` finite steps
without a spike. Checkpoints of an unstable run may have bad weights. The last stable checkpoint is therefore not
removed. bad_steps.jsonl has a line for each non-finite step and each reported spike, with the files and lines of
the step's rows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections.safety import SafetyConfig
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.trainer.checkpoints.output_dir import BAD_STEPS_FILE
from paddlenlp_ext.trainer.stability.loss_scale import LossScale
from paddlenlp_ext.trainer.train_step import NonFiniteError, OptimizerStep
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)

_MAX_NAMED_ROWS = 8
_SMALLEST_DEVIATION = 0.01
"""Minimum standard deviation for spike detection, as a fraction of the mean. Equal losses have a standard deviation of
0."""


class RollbackRequest(Exception):  # noqa: N818 (control flow, not an error)
    """Request to continue from the last stable checkpoint; `error` describes the failed step."""

    def __init__(self, error: NonFiniteError) -> None:
        super().__init__(str(error))
        self.error = error


class StepGuard:
    """Run optimizer steps under `nan_policy`, and detect loss spikes.

    Args:
        config: the run's `config.safety`.
        rows: the training rows; `rows.source(i)` returns (file, line).
        output_dir: folder of bad_steps.jsonl; None on processes that write no files.
    """

    def __init__(self, config: SafetyConfig, rows: Any, output_dir: Path | None) -> None:
        self.config, self.rows = config, rows
        self._path = None if output_dir is None else output_dir / BAD_STEPS_FILE
        self._intervals = config.skipped_intervals

    def run(
        self, step: OptimizerStep, step_batch: StepBatch, state: TrainerState, learning_rate: float
    ) -> StepReport | None:
        """Run one step and return its report; None if the step is skipped.

        Raises:
            NonFiniteError: loss or gradient norm is not finite, and `nan_policy` or `max_nan_steps` ends the run.
            RollbackRequest: loss or gradient norm is not finite, and `nan_policy` is rollback.
        """
        number = state.step + 1
        if number in state.skipped_steps or any(first <= number <= last for first, last in self._intervals):
            logger.info("step %d: the data of the step are skipped", number)
            return None
        scale = state.loss_scale
        try:
            report = step.run(step_batch, state.step, learning_rate, 1.0 if scale is None else scale.scale)
        except NonFiniteError as error:
            if scale is not None and error.is_overflow and not scale.is_minimal():
                _lower_scale(scale, state)
            else:
                self._handle_non_finite(error, step_batch, state, learning_rate)
            return None
        if scale is not None:
            scale.update(overflow=False)
        self._watch(report, step_batch, state)
        return report

    def _handle_non_finite(
        self, error: NonFiniteError, step_batch: StepBatch, state: TrainerState, learning_rate: float
    ) -> None:
        number, policy, limit = state.step + 1, self.config.nan_policy, self.config.max_nan_steps
        _mark_unstable(state, number)
        state.num_nan_steps += 1
        exceeds = policy != "raise" and state.num_nan_steps > limit
        action = "raise" if exceeds else policy
        numbers = {"loss": error.loss, "grad_norm": error.grad_norm, "learning_rate": learning_rate}
        if state.loss_scale is not None:
            numbers["loss_scale"] = state.loss_scale.scale
        self._write("non_finite", action, step_batch, state, numbers)
        described = NonFiniteError(
            error.loss,
            error.grad_norm,
            f"step {number}: {error}. Parameters are unchanged. Rows of the step: {self._named_rows(step_batch)}. "
            f"Check these rows ({BAD_STEPS_FILE} in output_dir lists all rows of the step), or lower learning_rate "
            f"({learning_rate:.3g} in this step)",
        )
        if exceeds:
            raise NonFiniteError(
                error.loss,
                error.grad_norm,
                f"{described}; max_nan_steps allows {limit} consecutive non-finite steps",
            ) from error
        if action == "raise":
            raise described from error
        if action == "rollback":
            raise RollbackRequest(described) from error
        logger.warning("%s. The step is skipped (nan_policy: skip)", described)

    def _watch(self, report: StepReport, step_batch: StepBatch, state: TrainerState) -> None:
        """Report a loss spike, or add the loss to the running mean; detect the end of an unstable interval."""
        number, losses, window = state.step + 1, state.recent_losses, self.config.loss_spike_window
        if number > max(state.skipped_steps, default=0):
            state.num_nan_steps = 0
        if self.config.loss_spike_sigma and 2 * len(losses) >= max(window, 4):
            mean = float(np.mean(losses))
            deviation = max(float(np.std(losses, ddof=1)), _SMALLEST_DEVIATION * abs(mean))
            if report.loss > mean + self.config.loss_spike_sigma * deviation:
                self._report_spike(report, mean, deviation, step_batch, state)
                return
        losses.append(report.loss)
        del losses[:-window]
        if state.unstable_since and number - state.last_unstable >= window:
            logger.info("step %d: no loss spike and no NaN for %d steps", number, window)
            state.unstable_since = state.last_unstable = 0

    def _report_spike(
        self, report: StepReport, mean: float, deviation: float, step_batch: StepBatch, state: TrainerState
    ) -> None:
        """Write and log a loss spike.

        A spike directly after an unstable step is reported only in step 2, 4, 8, ... of the unstable interval.
        """
        number = state.step + 1
        follows = state.last_unstable == number - 1
        _mark_unstable(state, number)
        length = number - state.unstable_since + 1
        if follows and length & (length - 1):
            return
        numbers = {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "running_mean": mean,
            "standard_deviation": deviation,
        }
        self._write("loss_spike", "report", step_batch, state, numbers)
        logger.warning(
            "step %d: loss spike: %.4f is %.1f standard deviations above the running mean %.4f (gradient norm %.3g). "
            "Rows of the step: %s. The last stable checkpoint is kept (loss_spike_sigma: 0 disables spike detection)",
            *(number, report.loss, (report.loss - mean) / deviation, mean, report.grad_norm),
            self._named_rows(step_batch),
        )

    def _locations(self, step_batch: StepBatch) -> list[str]:
        return ["{}:{}".format(*self.rows.source(row)) for row in step_batch.row_indices]

    def _named_rows(self, step_batch: StepBatch) -> str:
        indices = step_batch.row_indices
        named = ["row {} ({}:{})".format(row, *self.rows.source(row)) for row in indices[:_MAX_NAMED_ROWS]]
        num_more = len(indices) - len(named)
        return ", ".join(named) + (f" and {num_more} more" if num_more else "")

    def _write(
        self, reason: str, action: str, step_batch: StepBatch, state: TrainerState, numbers: dict[str, float]
    ) -> None:
        """Append a line to bad_steps.jsonl. NaN and infinity, which JSON lacks, are written as strings."""
        if self._path is None:
            return
        entry = {
            "step": state.step + 1,
            "epoch": step_batch.epoch,
            "reason": reason,
            "action": action,
            **{name: value if math.isfinite(value) else str(value) for name, value in numbers.items()},
            "rows": self._locations(step_batch),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _lower_scale(scale: LossScale, state: TrainerState) -> None:
    """Lower the loss scale after an overflow of float16 gradients, and count the step as skipped."""
    before = scale.scale
    scale.update(overflow=True)
    state.overflow_steps.append(state.step + 1)
    logger.warning(
        "step %d: gradients overflow in float16 and the step is skipped; loss scale %g, was %g (skipped so far: %d)",
        *(state.step + 1, scale.scale, before, len(state.overflow_steps)),
    )


def _mark_unstable(state: TrainerState, number: int) -> None:
    state.unstable_since, state.last_unstable = state.unstable_since or number, number
