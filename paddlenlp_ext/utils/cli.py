"""How a command of this project ends: a user's mistake is one clear message and exit code 2, not a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

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
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
