"""Configuration section for failure handling and the time limit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.durations import parse_time

NAN_POLICIES = ("raise", "skip", "rollback")


@dataclass(frozen=True, kw_only=True)
class SafetyConfig(OptionGroup):
    """`config.safety`: NaN and infinity, loss spikes, data to skip, and the time limit of a run."""

    nan_policy: str = option(
        "raise",
        choices=NAN_POLICIES,
        synonyms={"error": "raise"},
        help="reaction to NaN or infinity in loss or gradients: raise an error, skip the step, or go back to the last "
        "good checkpoint and skip the rows of the unstable steps (rollback)",
    )
    max_nan_steps: int = option(
        10,
        minimum=1,
        help="with nan_policy skip or rollback: maximum number of consecutive steps with NaN or infinity",
    )
    loss_spike_sigma: float = option(
        6.0, minimum=0, help="warn if the loss is this many standard deviations above its running mean; 0: never"
    )
    loss_spike_window: int = option(50, minimum=2, help="number of steps in the running mean of the loss")
    skip_data_intervals: object | None = option(
        None, help="steps whose data is skipped: pairs [first, last], counted from 1, such as [[100, 120]]"
    )
    max_train_time: float | str | None = option(
        None,
        help='time limit in seconds, "HH:MM:SS" or "D-HH:MM:SS": the run saves a checkpoint and stops before the limit',
    )

    @property
    def skipped_intervals(self) -> tuple[tuple[int, int], ...]:
        """Return `skip_data_intervals` as pairs (first step, last step)."""
        return parse_intervals(self.skip_data_intervals)

    @property
    def max_train_seconds(self) -> float | None:
        """Return `max_train_time` in seconds; None: no limit."""
        return None if self.max_train_time is None else parse_time(self.max_train_time)


def parse_intervals(value: Any) -> tuple[tuple[int, int], ...]:
    """Parse intervals of steps: a list of pairs, or its JSON text from the command line.

    Raises:
        ValueError: an interval is not [first, last] with 1 <= first <= last.
    """
    intervals = value
    if isinstance(value, str):
        try:
            intervals = json.loads(value)
        except json.JSONDecodeError:
            intervals = [value]
    if intervals is None:
        return ()
    for interval in intervals if isinstance(intervals, list) else [intervals]:
        is_pair = isinstance(interval, list) and len(interval) == 2 and all(type(step) is int for step in interval)
        if not (is_pair and 1 <= interval[0] <= interval[1]):
            raise ValueError(
                f"skip_data_intervals: {interval!r} is not an interval [first, last] of steps, counted from 1; "
                "write for example [[100, 120]]"
            )
    return tuple((first, last) for first, last in intervals)
