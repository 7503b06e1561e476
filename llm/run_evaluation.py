"""Evaluate a model, or compare a base model with its adapter: python llm/run_evaluation.py --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.evaluation.arguments import parse_arguments
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Run the evaluation; errors in arguments and task files are reported before Paddle is imported."""
    arguments, tasks = parse_arguments(argv)
    require_paddle()
    from paddlenlp_ext.cli.run_evaluation import run_evaluation

    run_evaluation(arguments, tasks)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
