"""Score the answers in a file with a reward model: llm/predict/reward_predictor.py --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    require_paddle()
    from paddlenlp_ext.cli.reward_predictor import reward_predictor

    reward_predictor(argv)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
