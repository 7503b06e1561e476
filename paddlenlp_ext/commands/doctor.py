"""Command `pnx doctor`: check the installation, as `python -m paddlenlp_ext.doctor` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.doctor.arguments import USAGE, parse_arguments


def run(argv: Sequence[str]) -> None:
    """Check the installation, print a report, and exit with code 1 if a check failed."""
    arguments = parse_arguments(argv, USAGE.replace("python -m paddlenlp_ext.doctor", "pnx doctor"))
    require_paddle()
    from paddlenlp_ext.doctor.run_doctor import run_doctor

    sys.exit(run_doctor(arguments))
