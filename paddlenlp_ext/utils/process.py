"""How a command of this project ends: a user's mistake is one clear message and exit code 2, not a traceback."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from paddlenlp_ext.utils.distributed_env import is_main_rank, rank

_PACKAGE = Path(__file__).resolve().parents[1]
_LOST_ANOTHER = re.compile(
    r"gloo/transport/.*(Connection|TIMEOUT|Timed out|Broken pipe)|TCPStore|TcpStore|tcp_(store|utils)"
)
_PR_SET_PDEATHSIG = 1
_LAUNCHER_LOOKS_EVERY = 4.0  # seconds, and a little: Paddle's looks every 3


def run_command(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Call `main` with the command line and leave the process with 0, or with 2 after a user's mistake.

    Only a `ValueError` or `ModuleNotFoundError` that this project itself raised is a user's mistake; the same error out
    of a library, and any other, is a defect and keeps its traceback.
    """
    _follow_launcher()
    try:
        main(sys.argv[1:] if argv is None else argv)
    except (ValueError, ModuleNotFoundError) as error:
        if _is_peer_failure(error):
            _leave_it_to_the_other(error)
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        scripts = Path(main.__code__.co_filename).resolve().parent
        if raised_in.parent != scripts and _PACKAGE not in raised_in.parents:
            report_to_launcher(traceback.format_exc())
            raise
        print(f"error: {error}", file=sys.stderr)
        report_to_launcher(f"error: {error}\n")
        sys.exit(2)
    except Exception as error:
        if _is_peer_failure(error):
            _leave_it_to_the_other(error)
        report_to_launcher(traceback.format_exc())
        raise


def _follow_launcher() -> None:
    """Let the system send SIGTERM to this process of several when their launcher is gone, on Linux.

    Paddle's launcher over gloo has no handler for a SIGTERM of its own: its processes would go on without it.
    """
    if "PADDLE_CURRENT_ENDPOINT" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_peer_failure(error: Exception) -> bool:
    """Whether this process only noticed that it has lost another one of the run."""
    # Where the launcher's store is gone, Paddle calls that an invalid argument: a ValueError.
    return isinstance(error, (RuntimeError, ValueError)) and bool(_LOST_ANOTHER.search(str(error)))


def _leave_it_to_the_other(error: Exception) -> NoReturn:
    """End without an error of its own, late enough for the launcher to find, and name, the process that ended first."""
    print(
        f"error: another process of the run has ended, so this one can't go on ({error})", file=sys.stderr, flush=True
    )
    time.sleep(_LAUNCHER_LOOKS_EVERY)
    sys.exit(1)


def report_to_launcher(text: str) -> None:
    """Show why this process of several ends, where a user looks: the launcher shows the first one's output alone.

    It goes to the launcher's own standard error, on Linux; the process's log has it in any case.
    """
    if is_main_rank() or "PADDLE_CURRENT_ENDPOINT" not in os.environ:
        return
    try:
        descriptor = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    with os.fdopen(descriptor, "w") as launcher:
        launcher.write(f"[rank {rank()}] {text}")
