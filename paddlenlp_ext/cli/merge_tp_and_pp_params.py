"""Program llm/merge_tp_and_pp_params.py: merge a PaddleNLP checkpoint with one file per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.config.command_line import parse_arguments
from paddlenlp_ext.config.dataclass_options import OptionGroup, option, options_of

_USAGE = """merge_tp_and_pp_params.py --model_name_or_path DIR --tp 2 --pp 2 --allow_pickle [--key value ...]

Merge a model that PaddleNLP saved with one file per rank."""


@dataclass(frozen=True, kw_only=True)
class MergeShardsArguments(OptionGroup):
    """Arguments of merge_tp_and_pp_params.py."""

    model_name_or_path: str = option(MISSING, help="folder of the model that PaddleNLP saved")
    tensor_parallel_degree: int = option(
        MISSING, help="tensor-parallel degree of the run that saved the model", minimum=0, aliases=("tp",)
    )
    pipeline_parallel_degree: int = option(
        MISSING, help="pipeline-parallel degree of the run that saved the model", minimum=0, aliases=("pp",)
    )
    output_path: str | None = option(None, help="folder of the merged model; unset: model_name_or_path")
    overwrite: bool = option(False, help="replace a model at the output path")
    device: str = option("cpu", help="accepted for compatibility; no effect, because nothing is computed")
    allow_pickle: bool = option(False, help="read the .pdparams files; only arrays are accepted")


def merge_shards(argv: Sequence[str]) -> str:
    """Merge the shards of a model; return a one-line summary.

    Args:
        argv: the command line without the program's name.

    Raises:
        ValueError: the arguments are invalid, or `merge_saved_shards` raises a ValueError.
    """
    values, _ = parse_arguments(argv, options_of(MergeShardsArguments, "arguments"), _USAGE)
    arguments = MergeShardsArguments(**values)
    if not arguments.allow_pickle:
        raise ValueError("the shards are pickles (.pdparams); add --allow_pickle to read the arrays in them")
    require_paddle()
    from paddlenlp_ext.parallel.merge_paddlenlp_shards import merge_saved_shards

    report = merge_saved_shards(
        Path(arguments.model_name_or_path),
        arguments.tensor_parallel_degree,
        arguments.pipeline_parallel_degree,
        None if arguments.output_path is None else Path(arguments.output_path),
        arguments.overwrite,
    )
    return f"{report.output}: {report.num_tensors} tensors, {report.num_joined} of them joined from shards"
