"""Roofline of a training step: FLOPs of the step, matmul rate of the machine, and time of the step by kernel.

    python -m benchmarks.roofline [--model smollm2] [--steps 5] [--lora true --lora_rank 8 --bf16 true]

Models other than smollm2 have random weights, which are written to build/decoding once.

The matmul rate is the highest rate that oneDNN reaches on the shapes of the step, in the dtype in which the step
multiplies: float32 on processors without AVX-512. The rate is measured before and after the step. Further keys are
keys of llm/run_finetune.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.step_profile import profile_step  # isort: skip (before the ops)

from benchmarks.arithmetic import linear_shapes, step_operations
from benchmarks.decoding import prepare
from benchmarks.matmul_rate import onednn_rates
from benchmarks.measure import SHAPES, random_documents, report, time_steps
from benchmarks.ours import packed_batch, run_config, training_step
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.ops.cpp.bf16 import conversion_reason
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES], default="smollm2")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learned", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    args, keys = parser.parse_known_args(argv)
    tokens, shape = args.documents * args.length, SHAPES[args.model]
    if args.model != "smollm2":
        keys = ["--model_name_or_path", str(prepare(args.model, "folder")), *keys]
    config, batch = run_config(keys), packed_batch(random_documents(args.documents, args.length), args.learned)
    rank = config.peft.rank if config.peft is not None else None
    parts = step_operations(shape, [args.length] * args.documents, batch.num_target_tokens, rank)

    dtype = "bfloat16" if config.precision.bf16 and conversion_reason() is None else "float32"
    before = onednn_rates(dtype, tokens, linear_shapes(shape))
    step = training_step(build_model(ModelSource.from_config(config.model), config), config, batch)
    figures = time_steps(step, args.steps, tokens)
    kernels = profile_step(step)
    after = onednn_rates(dtype, tokens, linear_shapes(shape))
    rates = {name: max(before[name], after[name]) for name in before}

    seconds, total, best = tokens / figures["tokens_per_second"], sum(parts.values()), max(rates.values())
    share = total / seconds / (best * 1e9)
    show(parts, kernels, f"{total / 1e9:.0f} GFLOP in {seconds:.3f} s: {share:.0%} of {best:.0f} GFLOP/s")
    figures |= {
        "gflop": {name: count / 1e9 for name, count in parts.items()},
        "gflop_per_second": rates,
        "roofline_share": share,
        "kernel_seconds": kernels,
    }
    report("roofline", {**vars(args), "keys": keys, **figures}, "paddlepaddle")


def show(parts: dict[str, float], kernels: dict[str, float], summary: str) -> None:
    """Print two Markdown tables and the sum to stderr; the JSON line goes to stdout."""
    lines = ["| arithmetic | GFLOP |", "|---|---|", *(f"| {name} | {ops / 1e9:.1f} |" for name, ops in parts.items())]
    total_seconds = sum(kernels.values())
    lines += ["", "| kernel | seconds | share |", "|---|---|---|"]
    shown = [(name, seconds) for name, seconds in kernels.items() if seconds >= 0.005 * total_seconds]
    rest = total_seconds - sum(seconds for _, seconds in shown)
    lines += [
        f"| {name} | {seconds:.3f} | {seconds / total_seconds:.1%} |" for name, seconds in [*shown, ("others", rest)]
    ]
    print("\n".join([*lines, "", summary]), file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
