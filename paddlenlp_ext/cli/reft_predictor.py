"""Translate the command line of PaddleNLP's ReFT predictor to arguments of predictor.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path

from paddlenlp_ext.config.command_line import parse_arguments
from paddlenlp_ext.config.dataclass_options import OptionGroup, option, options_of
from paddlenlp_ext.utils.files import read_json_object

_USAGE = """reft_predictor.py --model_name_or_path MODEL --reft_path REFT [--data_file ROWS] [--key value ...]

Answer a file of rows, or chat in the terminal, with a ReFT model."""


@dataclass(frozen=True, kw_only=True)
class ReftArguments(OptionGroup):
    """Arguments of reft_predictor.py."""

    model_name_or_path: str = option(MISSING, help="base model")
    reft_path: str = option(MISSING, help="folder of the ReFT adapter")
    data_file: str | None = option(None, help="rows to answer, one JSON object per line; unset: chat in the terminal")
    output_file: str = option("output.json", help='output file, with a line {"src", "tgt", "output"} for each row')
    batch_size: int = option(1, help="number of prompts decoded together", minimum=1)
    max_length: int = option(1024, help="maximum number of tokens in prompt and answer together", minimum=1)
    src_length: int = option(512, help="maximum number of tokens in a prompt; longer prompts are truncated", minimum=1)
    num_beams: int = option(1, help="number of beams; 1: greedy search", minimum=1)
    device: str | None = option(None, help="a device (docs/devices.md); unset: a GPU if there is one")
    dtype: str | None = option(None, help="float32, bfloat16 or float16; unset: float32 on the CPU, else bfloat16")
    chat_template: str | None = option(
        None,
        help="Jinja or JSON file with the chat template; none: no template; unset: the template of the training run",
    )


def predictor_arguments(argv: Sequence[str]) -> list[str]:
    """Return the equivalent command line of predictor.py.

    As in PaddleNLP's ReFT predictor, `--max_length` counts prompt and answer together, and decoding is a greedy or beam
    search.

    Raises:
        ValueError: an argument is invalid, no tokens are left for answers, or the adapter is not a ReFT adapter.
    """
    values, _ = parse_arguments(argv, options_of(ReftArguments, "arguments"), _USAGE)
    arguments = asdict(ReftArguments(**values))
    check_reft(Path(arguments["reft_path"]).expanduser())
    arguments["lora_path"] = arguments.pop("reft_path")
    arguments["total_max_length"] = arguments["max_length"]
    arguments["max_length"] = new_tokens = arguments["max_length"] - arguments["src_length"]
    if new_tokens < 1:
        total, prompt = arguments["total_max_length"], arguments["src_length"]
        raise ValueError(
            f"--max_length {total} leaves no tokens after --src_length {prompt}; raise --max_length or lower "
            "--src_length"
        )
    arguments["decode_strategy"] = "beam_search" if arguments["num_beams"] > 1 else "greedy_search"
    return [word for name, value in arguments.items() if value is not None for word in (f"--{name}", str(value))]


def check_reft(folder: Path) -> None:
    """Check that the adapter in a folder is a ReFT adapter; a folder without an adapter passes.

    Raises:
        ValueError: the adapter has a different type.
    """
    config = folder / "adapter_config.json"
    found = read_json_object(config).get("peft_type") if config.is_file() else "REFT"
    if found != "REFT":
        raise ValueError(
            f"--reft_path {folder} holds an adapter of type {found}; use predictor.py, which accepts any method"
        )
