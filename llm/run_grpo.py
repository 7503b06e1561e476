"""Train a model with GRPO: python llm/run_grpo.py CONFIG.json [MORE.json ...] [--key value ...]

`--help` lists every key, `--dry_run` prints the plan of the run, and `--preview_data N` prints N tokenized prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.config.help_text import print_requested_help
from paddlenlp_ext.config.requested_trackers import check_requested_trackers
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Print the help text, or run the program."""
    print_requested_help(argv, "grpo", "run_grpo.py")
    check_requested_trackers(argv)
    require_paddle()
    from paddlenlp_ext.cli.run_finetune import run_finetune
    from paddlenlp_ext.config.run_config import GRPO_SECTIONS

    run_finetune(argv, GRPO_SECTIONS, "run_grpo.py")


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
