"""Parse the command line of llm/predict/export_model.py, without the delay of importing Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.cli.predict_arguments import kernel_keys
from paddlenlp_ext.config.command_line import parse_arguments as parse_command_line
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.inference.arguments import QUANT_TYPES, LoadArguments
from paddlenlp_ext.utils.distributed_env import require_single_process
from paddlenlp_ext.utils.logging import get_logger

USAGE = (
    "export_model.py --model_name_or_path MODEL --output_path FOLDER [--key value ...]\n\n"
    "Write a model, with an adapter merged into it, as a static graph for paddle.inference."
)


@dataclass(frozen=True, kw_only=True)
class ExportArguments(LoadArguments):
    """Arguments of export_model.py."""

    output_path: str = option(MISSING, aliases=("out",), help="folder of the exported model")
    model_prefix: str = option("model", help="name of the program files, without suffix")
    quant_type: str | None = option(
        None,
        choices=QUANT_TYPES,
        help="format of the weights of linear layers; unset: the format of the loaded weights",
    )
    overwrite: bool = option(False, help="replace a model at the output path")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_prefix or Path(self.model_prefix).name != self.model_prefix:
            raise ValueError(f"--model_prefix {self.model_prefix!r} is not a file name; write a name without folders")


_OPEN_SIZES = {
    "src_length": 1024,
    "max_length": 1024,
    "min_length": 1,
    "total_max_length": 4096,
    "batch_size": 1,
}
_DECODING: dict[str, Any] = {
    "decode_strategy": "sampling",
    "top_k": 0,
    "top_p": 0.7,
    "temperature": 0.95,
    "repetition_penalty": 1.0,
    "data_file": "",
    "output_file": "output.json",
}


def _idle(values: dict[str, Any], reason: str) -> list[CompatKey]:
    return [CompatKey(name, (value,), reason, type(value), "no effect") for name, value in values.items()]


_COMPAT = (
    *_idle(_OPEN_SIZES, "the exported program accepts any batch size and length"),
    *_idle(_DECODING, "the exported program only computes logits; pass the argument to predictor.py"),
    *kernel_keys("exported programs always decode with a KV cache and use Paddle's operators"),
    CompatKey("mode", ("dynamic", "static"), "the export always reads a dynamic model", str, "no effect"),
    CompatKey("chat_template", (None,), "pass the argument to predictor.py", str, "not here"),
    CompatKey("prefix_path", (None,), "a trained prefix cannot be merged into the weights", str, "not here"),
    CompatKey("export_precache", (False,), "a trained prefix cannot be merged into the weights", bool, "not here"),
    CompatKey("cachekv_int8_type", (None, "None", ""), "leave it out", str),
    CompatKey("speculate_method", (None, "None", ""), "leave it out", str),
    CompatKey("tensor_parallel_degree", (1,), "leave it at 1", int),
)


def parse_arguments(argv: Sequence[str], usage: str = USAGE) -> ExportArguments:
    """Parse the command line; `usage` is the beginning of the help text.

    Raises:
        ConfigError: arguments are unknown, missing or invalid; the message lists all problems.
        ValueError: `model_prefix` is not a file name, or a launcher started several processes.
    """
    require_single_process("the export")
    values, notes = parse_command_line(argv, options_of(ExportArguments, "arguments"), usage, _COMPAT)
    for note in notes:
        get_logger().info("%s", note)
    return ExportArguments(**values)
