"""Sample answers, score them with reward functions, and write training rows: python llm/run_sampling.py --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.cli.sampling_arguments import parse_arguments
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Sample answers; errors in the arguments are reported before Paddle is imported."""
    arguments, rewards = parse_arguments(argv)
    require_paddle()
    from paddlenlp_ext.cli.run_sampling import run_sampling

    run_sampling(arguments, rewards)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
