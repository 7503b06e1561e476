"""Command line of PaddleNLP's ReFT predictor, translated to the arguments of predictor.py. Imports no Paddle."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def predictor_arguments(argv: Sequence[str]) -> list[str]:
    """Return the command line of predictor.py that is equivalent to `argv`.

    `--max_length` counts prompt and answer together here, as in PaddleNLP, and decoding is greedy.

    Raises:
        ValueError: no tokens are left for answers, or the folder holds an adapter of another method.
    """
    parser = argparse.ArgumentParser(
        prog="reft_predictor.py", description="Answer a file of rows with a ReFT model.", allow_abbrev=False
    )
    parser.add_argument("--model_name_or_path", required=True, help="base model")
    parser.add_argument("--reft_path", required=True, help="folder of the ReFT adapter")
    parser.add_argument("--data_file", required=True, help="rows to answer, one JSON object per line")
    parser.add_argument("--output_file", default="output.json", help='file for the lines {"src", "tgt", "output"}')
    parser.add_argument("--batch_size", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--max_length", type=int, default=1024, help="maximum tokens of prompt and answer together")
    parser.add_argument("--src_length", type=int, default=512, help="maximum tokens of a prompt; longer: truncated")
    parser.add_argument("--num_beams", type=int, default=1, help="only 1: beam search is not available")
    parser.add_argument("--device", help="cpu, gpu, gpu:1, ...; default: a GPU if there is one")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: float32 on the CPU, else bfloat16")
    parser.add_argument("--chat_template", help="Jinja or JSON file, or none; default: that of the training run")
    arguments = vars(parser.parse_args(argv))
    check_reft(Path(arguments["reft_path"]).expanduser())
    arguments["lora_path"] = arguments.pop("reft_path")
    arguments["total_max_length"] = arguments["max_length"]
    arguments["max_length"] = new_tokens = arguments["max_length"] - arguments["src_length"]
    if new_tokens < 1:
        total, prompt = arguments["total_max_length"], arguments["src_length"]
        raise ValueError(
            f"--max_length {total} leaves no tokens after --src_length {prompt}; raise the first or lower the second"
        )
    arguments["decode_strategy"] = "greedy_search"
    return [word for name, value in arguments.items() if value is not None for word in (f"--{name}", str(value))]


def check_reft(folder: Path) -> None:
    """Check the method of the adapter; loading it reports other errors in the folder.

    Raises:
        ValueError: the folder holds an adapter of another method.
    """
    config = folder / "adapter_config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("peft_type") if config.is_file() else "REFT"
    if found != "REFT":
        raise ValueError(
            f"--reft_path {folder} holds an adapter of type {found}; use predictor.py, which accepts any method"
        )
