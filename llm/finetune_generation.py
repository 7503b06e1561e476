"""Fine-tune a model: python llm/finetune_generation.py --config SFT.json [--lora LORA.json | --q_lora LORA.json]

Earlier versions of PaddleNLP use the name finetune_generation.py for run_finetune.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.cli.finetune_generation import run_finetune_arguments
from paddlenlp_ext.config.help_text import print_requested_help
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Print the help text, or translate the arguments and run the program of run_finetune.py."""
    print_requested_help(argv, "sft", "finetune_generation.py --config")
    require_paddle()
    arguments = run_finetune_arguments(argv)
    from paddlenlp_ext.cli.run_finetune import run_finetune

    run_finetune(arguments)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
