"""Generate answers with ReFT: llm/predict/reft_predictor.py --model_name_or_path M --reft_path R --data_file F."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.cli.reft_predictor import predictor_arguments
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Translate the arguments of PaddleNLP's ReFT predictor, and run the program of predictor.py."""
    arguments = parse_arguments(predictor_arguments(argv))
    require_paddle()
    from paddlenlp_ext.cli.predict import predict

    predict(arguments)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
