"""Time limit of a run (`max_train_time`): predict whether the next part of it, and a checkpoint, still fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_MARGIN = 1.25
_BYTES_PER_PARAMETER = 12
"""A value and two moments in float32."""
_BYTES_PER_SECOND = 1e8
_CHECKPOINT = ("write", "complete")
"""Parts of a checkpoint: its files are written, then hashed and flushed, perhaps in the background."""


class TimeLimit:
    """Clock that learns how long steps, evaluations and checkpoints take.

    Args:
        seconds: time of the run; None: no limit.
        num_trained: number of trained parameters, from which the time of the first checkpoint is estimated.
        started: `time.monotonic()` at the start of the run; None: now.
    """

    def __init__(self, seconds: float | None, num_trained: int = 0, started: float | None = None) -> None:
        self.seconds = seconds
        self._started = time.monotonic() if started is None else started
        self._longest = {"write": num_trained * _BYTES_PER_PARAMETER / _BYTES_PER_SECOND}

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Measure the block as one `part` of the run, such as "step"; the longest one predicts the next."""
        started = time.monotonic()
        yield
        self._longest[part] = max(self._longest.get(part, 0.0), time.monotonic() - started)

    def is_reached(self, part: str) -> bool:
        """Return whether another `part` and a checkpoint after it would end too late; parts not yet seen take 0 s."""
        if self.seconds is None:
            return False
        needed = _MARGIN * sum(self._longest.get(each, 0.0) for each in (part, *_CHECKPOINT))
        return time.monotonic() - self._started + needed > self.seconds
