"""Signals that stop a program, and their handlers outside of training.

| signal | effect |
|---|---|
| first | one line on standard error; `finally` blocks remove drafts, for at most three seconds; exit |
| second | exit immediately |

The exit code is 128 + the signal's number. Training has other handlers (`trainer/stopping/signals.py`).
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType
from typing import Any, NoReturn

SIGHUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Hangup: the terminal was closed; None on Windows."""
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK")
STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that ask a program to stop.

Ctrl-C sends SIGINT, and closing the terminal sends SIGHUP. Batch systems send SIGTERM to end a program, and SIGUSR1 as
a warning before the time limit. Windows lacks SIGUSR1 and SIGHUP, and has SIGBREAK (Ctrl-Break).
"""
_CLEANUP_SECONDS = 3.0

_received: int | None = None
"""Number of the first signal received outside of training, or None."""
_line = b""
"""Line about a signal, not yet written to standard error."""


class ProgramStopped(SystemExit):
    """Exit of a program after the first signal outside of training."""


@contextmanager
def handled_stop_signals() -> Iterator[None]:
    """Handle stop signals while the block runs; the module docstring lists the effects of a signal.

    The block is the main part of a program. If a signal arrived during the block, the process ends when the block ends,
    even if the block raises an exception. After the block, the next signal makes the process exit immediately.
    """
    handle_stop_signals(stop_program)
    keeper = _HandlerKeeper()
    sys.meta_path.insert(0, keeper)
    try:
        yield
    finally:
        if _received is not None:  # libraries may replace ProgramStopped with other exceptions, as `import paddle` does
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            _exit(_received)
        sys.meta_path.remove(keeper)
        handle_stop_signals(exit_at_once)


def handle_stop_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Set the handler of all STOP_SIGNALS, except signals that are ignored; nohup, for example, ignores SIGHUP.

    Outside the main thread, this function has no effect, because Python allows only the main thread to set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class _HandlerKeeper(MetaPathFinder):
    """Import hook that reinstalls the SIGTERM handler before the import of each Paddle module.

    Paddle's first modules install their own handler, which prints a report of ten lines. The import of the other Paddle
    modules then takes seconds, during which a signal can arrive. The hook does not find modules itself.
    """

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        if name.startswith("paddle.") and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGTERM)
            if callable(handler):
                signal.signal(signal.SIGTERM, handler)


@contextmanager
def kept_stop_signals() -> Iterator[None]:
    """Restore the handlers of stop signals after the block, because a library may replace them within the block."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: handler of a C++ library


@contextmanager
def default_stop_signals() -> Iterator[None]:
    """Restore the default action of stop signals, terminating the process, within the block.

    Some Paddle functions hold the GIL, so a handler in Python could not run until they return.
    """
    with kept_stop_signals():
        handle_stop_signals(signal.SIG_DFL)
        yield


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C within the block; restore the previous handler after the block."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def stop_program(number: int, frame: FrameType | None) -> NoReturn:
    """Handle the first signal outside of training: print a line and exit within three seconds.

    The process also ends if a library catches `ProgramStopped`. During an import, the process ends immediately, because
    modules such as Paddle's print their own messages when an exception interrupts their import.

    Raises:
        ProgramStopped: always, except during an import.
    """
    global _received
    _received = number
    if _is_importing(frame):
        exit_at_once(number)
    _report(number)
    sys.unraisablehook = lambda _: _exit(number)  # the exception was lost, for example in a destructor
    reader, writer = socket.socketpair()  # on Windows, `select` accepts only sockets
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    # `Thread.start` could wait for a lock that the interrupted code holds.
    _thread.start_new_thread(_exit_later, (number, reader))
    raise ProgramStopped(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def exit_at_once(number: int, frame: FrameType | None = None) -> NoReturn:
    """Handle a signal: print a line and end the process without running `finally` blocks or destructors."""
    _report(number)
    _exit(number)


def _report(number: int) -> None:
    """Print a line about a signal; the next signal ends the process, even if printing blocks."""
    global _line
    _line = f"stopped by {signal.Signals(number).name}\n".encode()
    handle_stop_signals(_exit)
    _write_line()


def _write_line() -> None:
    """Write the line about a signal to standard error, unless the interrupted code has begun to write the line."""
    global _line
    with suppress(OSError):  # the terminal has been closed, or the reader of the pipe has ended
        line, _line = _line, b""
        os.write(2, line)


def _exit_later(number: int, next_signal: socket.socket) -> None:
    """End the process at the next signal, or after `_CLEANUP_SECONDS`.

    Without this thread, the next signal could have no effect: the kernel may deliver the signal to another thread, and
    the main thread does not run the handler while it sleeps or waits for a lock.

    Args:
        number: the first signal.
        next_signal: socket from which the number of the next signal can be read.
    """
    is_readable, _, _ = select.select([next_signal], [], [], _CLEANUP_SECONDS)
    _exit(next_signal.recv(1)[0] if is_readable else number)


def _exit(number: int, frame: FrameType | None = None) -> NoReturn:
    _write_line()
    os._exit(128 + number)
