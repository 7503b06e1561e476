"""How a command of this project ends: a user's mistake is one clear message and exit code 2, not a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from paddlenlp_ext.utils.rank import is_main_rank, rank

_PACKAGE = Path(__file__).resolve().parents[1]


def run_command(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Call `main` with the command line and leave the process with 0, or with 2 after a user's mistake.

    Only a `ValueError` or `ModuleNotFoundError` that this project itself raised is a user's mistake; the same error out
    of a library, and any other, is a defect and keeps its traceback.
    """
    try:
        main(sys.argv[1:] if argv is None else argv)
    except (ValueError, ModuleNotFoundError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        scripts = Path(main.__code__.co_filename).resolve().parent
        if raised_in.parent != scripts and _PACKAGE not in raised_in.parents:
            tell_launcher(traceback.format_exc())
            raise
        print(f"error: {error}", file=sys.stderr)
        tell_launcher(f"error: {error}\n")
        sys.exit(2)
    except Exception:
        tell_launcher(traceback.format_exc())
        raise


def tell_launcher(text: str) -> None:
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
