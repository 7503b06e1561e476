"""A polite stop: the first SIGINT or SIGTERM lets the optimizer step finish and a checkpoint be saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from paddlenlp_ext.utils.logging import get_logger

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAID_AGAIN = 3.0
"""Seconds in which one more SIGTERM is the same one: Paddle's launchers send each process two or three of them."""


class TrainingStopped(SystemExit):
    """A signal ended the training, after its checkpoint was saved. Uncaught, the process exits with 128 + signal."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(128 + signal_number)
        self.message = message

    def __str__(self) -> str:
        return self.message


class _InterruptedError(Exception):
    """Raised by the first signal inside `StopSignals.interruptible`, which takes it."""


class StopSignals:
    """Context in which the first signal only sets `received`; a second one meets the handlers of before, so that it
    stops hard. Outside the main thread, where Python can't handle signals, it does nothing.

    Args:
        share: where several processes train together, the largest of a number of theirs: `received` then changes in
            `synchronize` alone, for all of them at the same step.
    """

    def __init__(self, share: Callable[[float], float] | None = None) -> None:
        self.received: int | None = None
        self._share = share
        self._own = 0
        self._since = 0.0
        self._interrupts = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._own:
            if number == self._own == signal.SIGTERM and time.monotonic() - self._since < _SAID_AGAIN:
                return
            self._restore()
            signal.raise_signal(number)
            return
        self._own, self._since = number, time.monotonic()
        if self._share is None:
            self.received = number
        get_logger(__name__).warning(
            "%s: finishing this optimizer step, then saving a checkpoint; once more to stop at once",
            signal.Signals(number).name,
        )
        if self._interrupts and self._share is None:
            raise _InterruptedError

    def synchronize(self) -> None:
        """Let every process know of a signal that one of them got; all call it at the same place."""
        if self._share is not None:
            self.received = int(self._share(self._own)) or None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that the first signal ends at once: for what can be done again, such as an evaluation.

        Several processes go through it to its end: none may leave the others waiting.
        """
        self._interrupts = True
        try:
            yield
        except _InterruptedError:
            pass
        finally:
            self._interrupts = False

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
