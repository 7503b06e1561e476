"""Quantize a trained model for serving: python llm/run_quantization.py CONFIG.json [--key value ...]

`--help` lists every key. `transformers`, vLLM and this project load the quantized model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.config.help_text import print_requested_help
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Print the help text, or run the program."""
    print_requested_help(argv, "quantize", "run_quantization.py")
    require_paddle()
    from paddlenlp_ext.cli.run_quantization import run_quantization

    run_quantization(argv)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
