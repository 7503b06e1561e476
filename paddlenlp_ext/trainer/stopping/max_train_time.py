"""Time limit of a run (`max_train_time`): stop while there is still time to save a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_MARGIN = 1.25
_BYTES_PER_PARAMETER = 12
"""Checkpoint bytes per trained parameter: its value and two moments in float32."""
_BYTES_PER_SECOND = 1e8
_CHECKPOINT = ("write", "complete")
"""Phases of a checkpoint: the files are written, then hashed and flushed, possibly in the background."""


class TimeLimit:
    """Clock that measures steps, evaluations and checkpoints to predict how long the next phase takes.

    Args:
        seconds: maximum duration of the run; None: no limit.
        num_trained: number of trained parameters, from which the time of the first checkpoint is estimated.
        started: `time.monotonic()` at the start of the run; None: now.
    """

    def __init__(self, seconds: float | None, num_trained: int = 0, started: float | None = None) -> None:
        self.seconds = seconds
        self._started = time.monotonic() if started is None else started
        self._longest = {"write": num_trained * _BYTES_PER_PARAMETER / _BYTES_PER_SECOND}

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Record the duration of the block for `phase`, such as "step"; predictions use the longest duration."""
        started = time.monotonic()
        yield
        self._longest[phase] = max(self._longest.get(phase, 0.0), time.monotonic() - started)

    def is_reached(self, phase: str) -> bool:
        """Return whether `phase` and a checkpoint may exceed the time limit, given their longest times so far."""
        if self.seconds is None:
            return False
        needed = _MARGIN * sum(self._longest.get(each, 0.0) for each in (phase, *_CHECKPOINT))
        return time.monotonic() - self._started + needed > self.seconds
