"""Generate answers to the rows of a file, or chat in the terminal: llm/predict/predictor.py --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Generate answers or chat; errors in the arguments are reported before Paddle is imported."""
    arguments = parse_arguments(argv)
    require_paddle()
    from paddlenlp_ext.cli.predict import predict

    predict(arguments)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
