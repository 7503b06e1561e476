"""Run a command-line program; print user errors as one line instead of a traceback, and exit with code 2."""

from __future__ import annotations

import ctypes
import io
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from paddlenlp_ext.utils import device_errors
from paddlenlp_ext.utils.distributed_env import is_main_rank, rank
from paddlenlp_ext.utils.stop_signals import handled_stop_signals
from paddlenlp_ext.utils.storage_errors import explain

_PACKAGE = Path(__file__).resolve().parents[1]
_PEER_LOST = re.compile(
    r"gloo/transport/.*(Connection|TIMEOUT|Timed out|Broken pipe)|TCPStore|TcpStore|tcp_(store|utils)"
)
_PR_SET_PDEATHSIG = 1
_EXIT_CODE_OF_SIGPIPE = 128 + 13  # Windows has no SIGPIPE
_LAUNCHER_POLL_SECONDS = 4.0  # Paddle's launcher polls every 3 seconds


def run_command(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Call `main` with the command line; exit with code 2 after a user error, or with code 128 + N after signal N.

    User errors are storage errors (such as a full disk), device errors (such as out of memory), and each `ValueError`
    or `ModuleNotFoundError` that this project raises. All other errors are defects and are shown with a traceback.
    If the reader of standard output has closed the pipe, the exit code is 141, as after SIGPIPE.
    """
    _follow_launcher()
    _open_standard_streams()
    try:
        with handled_stop_signals():
            main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
    except (ValueError, ModuleNotFoundError) as error:
        if _is_peer_failure(error):
            _exit_after_peer_failure(error)
        if (message := explain(error) or device_errors.explain(error)) is not None:
            _exit_after_user_error(message)
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        scripts = Path(main.__code__.co_filename).resolve().parent
        if raised_in.parent != scripts and _PACKAGE not in raised_in.parents:
            report_to_launcher(traceback.format_exc())
            raise
        _exit_after_user_error(str(error))
    except Exception as error:
        if _is_peer_failure(error):
            _exit_after_peer_failure(error)
        if isinstance(error, BrokenPipeError) and _output_has_no_reader():
            _discard_output()
            sys.exit(_EXIT_CODE_OF_SIGPIPE)
        if (message := explain(error) or device_errors.explain(error)) is not None:
            _exit_after_user_error(message)
        report_to_launcher(traceback.format_exc())
        raise


def _exit_after_user_error(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    report_to_launcher(f"error: {message}\n")
    _discard_output()
    sys.exit(2)


def _open_standard_streams() -> None:
    """Redirect closed standard streams to /dev/null, and escape characters that standard output cannot encode.

    Without the redirection, a file that is opened later, such as a checkpoint, could get the file descriptor of a
    closed stream, and text printed to the stream would be written to the file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Answers and paths may contain characters that the locale cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")


def _output_has_no_reader() -> bool:
    """Return whether the reader of standard output or standard error has closed the pipe; on Windows, return True."""
    if sys.platform == "win32":  # no poll
        return True
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _discard_output() -> None:
    """Redirect a standard stream to /dev/null if flushing fails; otherwise Python reports the error again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _follow_launcher() -> None:
    """Ask Linux to send SIGTERM to this process when its launcher dies.

    Paddle's launcher for gloo does not handle SIGTERM: when SIGTERM ends the launcher, the processes that it started
    continue to run.
    """
    if "PADDLE_CURRENT_ENDPOINT" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_peer_failure(error: Exception) -> bool:
    """Return whether the error reports only that another process of the run has ended."""
    # Paddle raises ValueError (invalid argument) if the connection to the launcher store is lost.
    return isinstance(error, (RuntimeError, ValueError)) and bool(_PEER_LOST.search(str(error)))


def _exit_after_peer_failure(error: Exception) -> NoReturn:
    """Exit after a delay in which the launcher can detect the process that failed first."""
    print(
        f"error: another process of the run has ended, so this process cannot continue ({error})",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(_LAUNCHER_POLL_SECONDS)
    sys.exit(1)


def report_to_launcher(text: str) -> None:
    """On Linux, write the error of a rank other than 0 to the standard error of the launcher.

    The launcher shows only the output of rank 0 and redirects other ranks to log files.
    """
    if is_main_rank() or "PADDLE_CURRENT_ENDPOINT" not in os.environ:
        return
    try:
        descriptor = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    with os.fdopen(descriptor, "w", encoding="utf-8") as launcher:
        launcher.write(f"[rank {rank()}] {text}")
