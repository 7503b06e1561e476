"""Command line that merges a PaddleNLP checkpoint with one file per rank. Paddle is loaded after parsing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def merge_shards(argv: Sequence[str]) -> str:
    """Merge the shards that `argv` names; return one line that describes the result.

    Raises:
        ValueError: see `merge_saved_shards`.
    """
    arguments = _parse(argv)
    from paddlenlp_ext.parallel.paddlenlp_shards import merge_saved_shards

    report = merge_saved_shards(
        arguments.model_name_or_path,
        arguments.tensor_parallel_degree,
        arguments.pipeline_parallel_degree,
        arguments.output_path,
    )
    return f"{report.output}: {report.num_tensors} tensors, {report.num_joined} of them joined from shards"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="merge_tp_and_pp_params.py",
        description="Merge a model that PaddleNLP saved with one file per rank.",
        allow_abbrev=False,
    )
    parser.add_argument("--model_name_or_path", required=True, type=Path, help="folder written by PaddleNLP")
    parser.add_argument(
        "--tensor_parallel_degree", "--tp", type=int, required=True, help="tensor-parallel degree of the run"
    )
    parser.add_argument(
        "--pipeline_parallel_degree", "--pp", type=int, required=True, help="pipeline-parallel degree of the run"
    )
    parser.add_argument("--output_path", type=Path, help="folder of the merged model; default: model_name_or_path")
    parser.add_argument("--device", default="cpu", help="accepted for compatibility, no effect: nothing is computed")
    parser.add_argument(
        "--allow_pickle", action="store_true", help="read the .pdparams files; objects other than arrays are refused"
    )
    arguments = parser.parse_args(argv)
    if not arguments.allow_pickle:
        parser.error(
            "the shards are pickles (.pdparams); add --allow_pickle (objects other than arrays in them are refused)"
        )
    return arguments
