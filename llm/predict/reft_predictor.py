"""Answer a file of rows with a model fine-tuned by ReFT:

python llm/predict/reft_predictor.py --model_name_or_path BASE --reft_path REFT --data_file dev.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from predictor import main as predict

from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.utils.process import run_command


def main(argv: Sequence[str]) -> None:
    """What predictor.py does with the same adapter, greedily, under PaddleNLP's arguments for ReFT."""
    predict(predictor_arguments(argv))


def predictor_arguments(argv: Sequence[str]) -> list[str]:
    """The command line of predictor.py that does what is asked here.

    Raises:
        ValueError: no room for answers, beams, or a folder without a ReFT adapter.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_name_or_path", required=True, help="the base model")
    parser.add_argument("--reft_path", required=True, help="folder of the interventions")
    parser.add_argument("--data_file", required=True, help="rows to answer, one JSON object a line")
    parser.add_argument("--output_file", default="output.json", help='where the lines {"src", "tgt", "output"} go')
    parser.add_argument("--batch_size", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--max_length", type=int, default=1024, help="most tokens of prompt and answer together")
    parser.add_argument("--src_length", type=int, default=512, help="most tokens of a prompt; a longer one is cut")
    parser.add_argument("--num_beams", type=int, default=1, help="1: beam search is not available")
    parser.add_argument("--device", help="cpu, gpu, gpu:1, ...; unset: a GPU where there is one")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; unset: float32 on the CPU, else bfloat16")
    parser.add_argument("--chat_template", help="Jinja or JSON file, or none; unset: the training's")
    arguments = vars(parser.parse_args(argv))
    check_reft(Path(arguments["reft_path"]).expanduser())
    arguments["lora_path"] = arguments.pop("reft_path")
    arguments["total_max_length"] = arguments["max_length"]
    arguments["max_length"] = new_tokens = arguments["max_length"] - arguments["src_length"]
    if new_tokens < 1:
        total, prompt = arguments["total_max_length"], arguments["src_length"]
        raise ValueError(f"--max_length {total} leaves no room behind --src_length {prompt}: raise it, or lower that.")
    arguments["decode_strategy"] = "greedy_search"
    return [word for name, value in arguments.items() if value is not None for word in (f"--{name}", str(value))]


def check_reft(folder: Path) -> None:
    """Refuse an adapter of another method; what else may be wrong with the folder, its reader says.

    Raises:
        ValueError: it holds an adapter of another method.
    """
    config = folder / "adapter_config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("peft_type") if config.is_file() else "REFT"
    if found != "REFT":
        raise ValueError(f"--reft_path {folder} holds an adapter of type {found}; predictor.py answers with any.")


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
