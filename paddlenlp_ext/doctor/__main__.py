"""Command-line entry point of the installation check: python -m paddlenlp_ext.doctor --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.doctor.arguments import parse_arguments
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Parse the command line before the slow import of Paddle, then check this installation."""
    arguments = parse_arguments(argv)
    require_paddle()
    from paddlenlp_ext.doctor.run_doctor import run_doctor

    sys.exit(run_doctor(arguments))


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
