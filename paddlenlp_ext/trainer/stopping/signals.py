"""Graceful shutdown: on the first stop signal or near `max_train_time`, finish the step and save a checkpoint.

| stop | exit code after the checkpoint is saved |
|---|---|
| SIGHUP, SIGINT, SIGUSR1, SIGTERM | 129, 130, 138, 143: 128 + the signal's number (Linux) |
| `max_train_time` | 75: EX_TEMPFAIL of sysexits.h, "try again later" |
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paddlenlp_ext.trainer.stopping.max_train_time import TimeLimit
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.stop_signals import SIGHUP, STOP_SIGNALS, exit_at_once, stop_program

TIME_LIMIT = 1000
"""Value of `StopSignals.received` for `max_train_time`, larger than all signal numbers."""
TIME_LIMIT_EXIT_CODE = 75
_REPEATED = (signal.SIGTERM, SIGHUP)
_REPEAT_SECONDS = 3.0
"""Seconds in which a repetition of a signal in `_REPEATED` is ignored. Paddle's launchers send SIGTERM to each process
two or three times, and both the system and the shell send SIGHUP when a terminal is closed."""


class TrainingStopped(SystemExit):
    """Exit after a signal or `max_train_time` stopped training and a checkpoint was saved.

    If uncaught, the exit code is 128 + signal, or 75 after `max_train_time`.
    """

    def __init__(self, reason: int, message: str) -> None:
        super().__init__(TIME_LIMIT_EXIT_CODE if reason == TIME_LIMIT else 128 + reason)
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return self.message


def stopped_after(step: int, total_steps: int, reason: int, checkpoint: Path) -> TrainingStopped:
    """Return the exit of a run that stopped after `step` of `total_steps` steps, and log its message."""
    message = (
        f"stopped by {describe_stop(reason)} after step {step} of {total_steps}; saved {checkpoint}. To continue: "
        "resume_from_checkpoint: true"
    )
    get_logger(__name__).warning(message)
    return TrainingStopped(reason, message)


def describe_stop(reason: int) -> str:
    """Return the name of the signal that stopped a run, or `max_train_time`."""
    return "max_train_time" if reason == TIME_LIMIT else signal.Signals(reason).name


class _InterruptedError(Exception):
    """Interruption of a block by the first signal; `StopSignals.interruptible` catches this exception."""


class StopSignals:
    """Context in which the first signal sets `received`, and the second signal ends the program.

    The second signal ends a program of this library (`run_command`) immediately. In other programs, the second
    signal calls the previous handler: Ctrl-C raises KeyboardInterrupt.

    Python handles signals only in the main thread. In other threads, only the time limit has an effect. An ignored
    SIGHUP, as under nohup, stays ignored.

    Args:
        all_reduce_max: function that returns the maximum of a number over all processes; None for a single process. In
            a distributed run, `received` changes only in `synchronize`, on all processes at the same step.
        time_limit: time limit of the run; None: no limit.

    Attributes:
        received: number of the signal that requests a stop, TIME_LIMIT, or None.
    """

    def __init__(
        self, all_reduce_max: Callable[[float], float] | None = None, time_limit: TimeLimit | None = None
    ) -> None:
        self.received: int | None = None
        self._all_reduce_max = all_reduce_max
        self.time_limit = time_limit or TimeLimit(None)
        self._local_signal = 0
        self._first_time = 0.0
        self._is_interruptible = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._local_signal:
            is_repetition = number == self._local_signal and number in _REPEATED
            if is_repetition and time.monotonic() - self._first_time < _REPEAT_SECONDS:
                return
            if self._previous_handlers[number] is stop_program:  # nothing is left to clean up
                exit_at_once(number)
            self._restore()
            signal.raise_signal(number)
            return
        self._local_signal, self._first_time = number, time.monotonic()
        if self._all_reduce_max is None:
            self.received = number
        get_logger(__name__).warning(
            "%s: finishing this optimizer step, then saving a checkpoint; repeat the signal to stop immediately",
            signal.Signals(number).name,
        )
        if self._is_interruptible and self._all_reduce_max is None:
            raise _InterruptedError

    def synchronize(self, next_part: str | None = None) -> None:
        """Set `received` on all processes if one process received a signal; collective.

        Args:
            next_part: next phase of the run ("step" or "evaluation"), checked against the time limit; None: no check.
        """
        reason = self._local_signal
        if not reason and next_part is not None and self.time_limit.is_reached(next_part):
            reason = TIME_LIMIT
        if self._all_reduce_max is not None:
            reason = int(self._all_reduce_max(reason))
        if reason == TIME_LIMIT and self.received is None:
            get_logger(__name__).warning("max_train_time: stopping in time to save a checkpoint")
        self.received = self.received or reason or None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run a repeatable block, such as an evaluation, and leave the block at the first signal.

        In a distributed run, signals do not interrupt the block, because its collectives need every process.
        """
        try:  # both assignments are inside `try`, because a signal may arrive before or after each assignment
            self._is_interruptible = True
            yield
            self._is_interruptible = False
        except _InterruptedError:
            pass
        finally:
            self._is_interruptible = False

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
