"""Comparison of optimizers on rows of GSM8K at several learning rates: loss, size of the state, memory, time of a step.

    python -m benchmarks.optimizers --gsm8k FOLDER [--steps 100 --max_length 512 --learning_rates 3e-5 1e-4]
        [--optimizers adamw muon] [--keys "--lora true --lora_rank 16"] [--out checkpoints/benchmarks/optimizers]

Every optimizer step is one pack of at most `--max_length` tokens, the same in all runs. Without `--keys`, all weights
are trained. Writes losses.png, with the run of each optimizer that has the lowest eval loss, and prints a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.compare_losses import draw, read_losses
from benchmarks.measure import environment
from benchmarks.training_runs import LAST, run_once
from paddlenlp_ext.utils.run_command import run_command

MODEL = "smollm2-135m-instruct"
KEYS = (
    "--model_name_or_path {model} --dataset_name_or_path {rows} --src_length {source} --max_length {length} "
    "--zero_padding true --greedy_zero_padding true --per_device_train_batch_size 1 --per_device_eval_batch_size 4 "
    "--do_train true --do_eval true --max_evaluate_steps 50 --logging_steps 1 --device cpu --disable_tqdm true "
    "--overwrite_output_dir true --warmup_ratio 0.05 --max_steps {steps} --save_strategy steps --save_steps {steps} "
    "--optim {optim} --learning_rate {rate}"
)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.json and dev.json")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max_length", type=int, default=512, help="maximum tokens of a step")
    parser.add_argument("--learning_rates", nargs="+", default=["3e-5", "1e-4"])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--keys", default="", help="further keys of llm/run_finetune.py")
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints" / "benchmarks" / "optimizers")
    args = parser.parse_args(argv)
    words = {"model": args.model, "rows": args.gsm8k, "steps": args.steps}
    words |= {"length": args.max_length, "source": args.max_length // 2}
    lines = [
        "| optimizer | learning rate | state GB | peak memory GB | seconds per step "
        f"| mean training loss of the last {LAST} steps | eval loss |",
        "|---" * 7 + "|",
    ]
    best: dict[str, tuple[float, Path]] = {}
    for optim in args.optimizers:
        for rate in args.learning_rates:
            folder = args.out / f"{optim}-{rate}"
            found = run_once(f"{KEYS.format(**words, optim=optim, rate=rate)} {args.keys}", folder)
            best[optim] = min(best.get(optim, (found.evaluation, folder)), (found.evaluation, folder))
            sizes = f"{found.state:.3f} | {found.peak:.2f} | {found.seconds:.2f}"
            lines.append(f"| {optim} | {rate} | {sizes} | {found.train:.4f} | {found.evaluation:.4f} |")
    curves = {folder.name: read_losses(folder / "metrics.jsonl") for _, folder in best.values()}
    draw(curves, args.out / "losses.png")
    print("\n".join(lines), json.dumps(environment("paddlepaddle")), sep="\n\n")


if __name__ == "__main__":
    run_command(main)
