"""Limit the wall time of a block of code that may hang, such as a user's function."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SECONDS_TO_REPEAT = 1.0
"""Interval of further signals, for code that caught the first exception and continued."""


class TimeLimitError(BaseException):
    """Error for a block that ran too long. It is not an `Exception`, which the code in the block may catch."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Interrupt the block after a wall time by a signal; None, outside the main thread and on Windows: no limit.

    Raises:
        TimeLimitError: the block ran longer than `seconds`.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _SECONDS_TO_REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
