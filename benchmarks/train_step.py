"""Tokens per second and peak memory of the trainer's optimizer step on random documents packed into one row.

    python -m benchmarks.train_step [--documents 4 --length 512 --learned 1.0 --steps 5] [--key value ...]

Several processes, started by `python -m paddle.distributed.launch`, print the peak memory of the process with the
largest peak. Each replica computes the same documents.

Further keys are keys of llm/run_finetune.py, such as `--lora true --lora_rank 8`, `--bf16 true`, `--recompute true`.
Without an adapter method, all weights are trained. benchmarks/peers/ has the step in other programs; `make bench` runs
all programs in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.measure import peak_memory_gb, random_documents, report, time_steps
from benchmarks.ours import packed_batch, run_config, training_step
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.process_group import DistributedProcesses
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learned", type=float, default=1.0, help="fraction of tokens that are target tokens")
    parser.add_argument(
        "--steps", type=int, default=5, help="number of timed steps, after an untimed step; 0: measure only memory"
    )
    args, keys = parser.parse_known_args(argv)

    batch = packed_batch(random_documents(args.documents, args.length), args.learned)
    config = run_config(keys)
    mesh = Mesh.from_config(config.parallel)
    built = build_model(ModelSource.from_config(config.model), config, mesh)
    group = DistributedProcesses(mesh, built.sharding, built.experts) if mesh.world.size > 1 else SingleProcess()
    step = training_step(built, config, batch, group)
    figures: dict[str, object] = {}
    if args.steps:
        figures = time_steps(step, args.steps, args.documents * args.length)
    else:
        step()
    peak = group.max_over_processes(peak_memory_gb())
    if group.is_main:
        report("train_step", {**vars(args), "keys": keys, **figures}, "paddlepaddle", peak_gb=peak)


if __name__ == "__main__":
    run_command(main)
