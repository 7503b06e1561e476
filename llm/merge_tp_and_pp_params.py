"""Make one model of a folder that PaddleNLP saved as one file a rank.

python llm/merge_tp_and_pp_params.py --model_name_or_path FOLDER --tp 2 --pp 2 --allow_pickle

What this project saves is one model whatever the layout, and needs no such merge.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.utils.process import run_command


def main(argv: Sequence[str]) -> None:
    """Merge, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model_name_or_path", required=True, type=Path, help="PaddleNLP's folder")
    parser.add_argument("--tensor_parallel_degree", "--tp", type=int, required=True, help="tensor ranks that wrote it")
    parser.add_argument("--pipeline_parallel_degree", "--pp", type=int, required=True, help="stages that wrote it")
    parser.add_argument("--output_path", type=Path, help="folder of the merged model; unset: the same folder")
    parser.add_argument("--device", default="cpu", help="taken and without effect: nothing is computed")
    parser.add_argument(
        "--allow_pickle", action="store_true", help="read the .pdparams files; what is no array in them is refused"
    )
    arguments = parser.parse_args(argv)
    if not arguments.allow_pickle:
        parser.error("the shards are pickles (.pdparams): add --allow_pickle; what is no array in them is refused")
    from paddlenlp_ext.parallel.paddlenlp_shards import merge_saved_shards

    report = merge_saved_shards(
        arguments.model_name_or_path,
        arguments.tensor_parallel_degree,
        arguments.pipeline_parallel_degree,
        arguments.output_path,
    )
    print(f"{report.output}: {report.num_tensors} tensors, {report.num_joined} of them joined from parts.")


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
