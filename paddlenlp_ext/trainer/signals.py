"""Graceful shutdown: on the first SIGINT or SIGTERM, finish the optimizer step and save a checkpoint."""

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
_REPEAT_SECONDS = 3.0
"""A SIGTERM within this time of the first is a repetition: Paddle's launchers send each process two or three."""


class TrainingStopped(SystemExit):
    """Training was stopped by a signal and its checkpoint saved; if uncaught, the exit code is 128 + signal."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(128 + signal_number)
        self.message = message

    def __str__(self) -> str:
        return self.message


class _InterruptedError(Exception):
    """Interruption of a block by the first signal; `StopSignals.interruptible` catches it."""


class StopSignals:
    """Context in which the first signal sets `received`, and a second signal reaches the previous handlers.

    Outside the main thread, where Python does not handle signals, the context does nothing.

    Args:
        all_reduce_max: maximum of a number over all processes of a distributed run; None for a single process. With
            it, `received` changes only in `synchronize`, on all processes at the same step.

    Attributes:
        received: number of the signal that requests a stop, or None.
    """

    def __init__(self, all_reduce_max: Callable[[float], float] | None = None) -> None:
        self.received: int | None = None
        self._all_reduce_max = all_reduce_max
        self._local_signal = 0
        self._first_time = 0.0
        self._is_interruptible = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._local_signal:
            if number == self._local_signal == signal.SIGTERM and time.monotonic() - self._first_time < _REPEAT_SECONDS:
                return
            self._restore()
            signal.raise_signal(number)
            return
        self._local_signal, self._first_time = number, time.monotonic()
        if self._all_reduce_max is None:
            self.received = number
        get_logger(__name__).warning(
            "%s: finishing this optimizer step, then saving a checkpoint; repeat the signal to stop at once",
            signal.Signals(number).name,
        )
        if self._is_interruptible and self._all_reduce_max is None:
            raise _InterruptedError

    def synchronize(self) -> None:
        """Share a signal that any process received with all processes; collective."""
        if self._all_reduce_max is not None:
            self.received = int(self._all_reduce_max(self._local_signal)) or None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run a block that can be repeated later, such as an evaluation; the first signal ends the block at once.

        In a distributed run the block runs to its end, because its collectives need every process.
        """
        self._is_interruptible = True
        try:
            yield
        except _InterruptedError:
            pass
        finally:
            self._is_interruptible = False

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
