"""Write a model as GGUF: python llm/export_gguf.py --model_name_or_path MODEL --output_file out.gguf --outtype f16"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.cli.export_gguf import export_arguments, run_export
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Write and check the GGUF file, and print a summary."""
    print(run_export(export_arguments(argv)))


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
