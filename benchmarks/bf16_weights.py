"""Full fine-tuning with float32 weights, and with bfloat16 weights with and without float32 copies: memory and loss.

    python -m benchmarks.bf16_weights [--steps 200 --max_length 128 --out checkpoints/benchmarks/bf16_weights]

Every optimizer step trains on one pack of at most `--max_length` tokens of the built-in dataset `inflection`; the packs
are the same in all runs. Peak memory is the largest resident size of the process. A run whose results are in the folder
is not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.measure import environment
from benchmarks.training_runs import LAST, run_once
from paddlenlp_ext.utils.run_command import run_command

MODEL = "smollm2-135m-instruct"
WEIGHTS = "--bf16 true --fp16_opt_level O2"
RUNS = {
    "float32": "",
    "bfloat16, float32 copies": WEIGHTS,
    "bfloat16, stochastic rounding": f"{WEIGHTS} --master_weight false",
}
KEYS = (
    "--model_name_or_path {model} --dataset_name_or_path inflection --src_length {source} --max_length {length} "
    "--zero_padding true --per_device_train_batch_size 1 --per_device_eval_batch_size 4 --do_train true --do_eval true "
    "--max_evaluate_steps 50 --logging_steps 1 --device cpu --overwrite_output_dir true --disable_tqdm true "
    "--learning_rate 3e-5 --warmup_ratio 0.05 --max_steps {steps}"
)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max_length", type=int, default=128, help="maximum tokens of a step")
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints" / "benchmarks" / "bf16_weights")
    args = parser.parse_args(argv)
    lines = [
        f"| weights | peak memory GB | file GB | mean training loss of the last {LAST} steps | eval loss |",
        "|---" * 5 + "|",
    ]
    for number, (name, more) in enumerate(RUNS.items()):
        folder = args.out / str(number)
        words = {"model": args.model, "length": args.max_length, "source": args.max_length // 2}
        found = run_once(f"{KEYS.format(**words, steps=args.steps)} {more}", folder)
        figures = f"{found.peak:.2f} | {found.file:.2f} | {found.train:.4f} | {found.evaluation:.4f}"
        lines.append(f"| {name} | {figures} |")
    print("\n".join(lines), json.dumps(environment("paddlepaddle")), sep="\n\n")


if __name__ == "__main__":
    run_command(main)
