"""Merge a VeRA adapter into its base model: python llm/merge_vera_params.py --vera_path ADAPTER --output_path MERGED"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.cli.merge_peft_params import merge_arguments, run_merge
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Merge the adapter, check the logits of the merged model, and print a summary."""
    arguments = merge_arguments(argv, __doc__, "--vera_path", ("--merge_vera_model_path",))
    print(run_merge(arguments))


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
