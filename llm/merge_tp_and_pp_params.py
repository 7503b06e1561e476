"""Merge a PaddleNLP model with one file per rank: merge_tp_and_pp_params.py --model_name_or_path DIR --tp 2 --pp 2.

This script is not needed for models that paddlenlp_ext saves, because their files do not depend on the number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.cli.merge_tp_and_pp_params import merge_shards
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Merge the shards and print a summary."""
    print(merge_shards(argv))


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
