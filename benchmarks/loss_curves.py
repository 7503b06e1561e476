"""Loss curves of one LoRA run in fp32, in bf16 and in transformers + peft, with equal rows, steps and initial weights.

    python -m benchmarks.loss_curves --gsm8k FOLDER [--steps 200 --max_length 1024 --out FOLDER]

Every optimizer step is one pack of at most `--max_length` tokens. Writes losses.png and losses.json, and prints the
differences of the curves.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks import ROOT, STARTED_WITH
from benchmarks.cases import BF16_KEYS, LORA_KEYS, PYTHONS
from benchmarks.compare_losses import describe, draw, read_losses
from benchmarks.measure import environment
from benchmarks.ours import MODEL, not_offered
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.utils.run_command import run_command

LEARNING_RATE = "5e-4"
KEYS = (
    "--dataset_name_or_path {gsm8k} --src_length {source} --max_length {length} "
    "--zero_padding true --greedy_zero_padding true "
    "--per_device_train_batch_size 1 --do_train true --logging_steps 1 --device cpu --overwrite_output_dir true "
    f"--learning_rate {LEARNING_RATE} --lr_scheduler_type linear --warmup_steps {{warmup}} --max_steps {{steps}}"
)


def run(python: str | Path, *words: str | Path) -> None:
    """Run one program of the comparison from the root of the project."""
    print(f"$ {shlex.join(map(str, words))}", flush=True)
    subprocess.run([str(python), *map(str, words)], cwd=ROOT, env=STARTED_WITH, check=True)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max_length", type=int, default=1024, help="maximum tokens of a step")
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints" / "benchmarks")
    parser.add_argument(
        "--python", type=Path, default=ROOT / PYTHONS["torch"], help="Python interpreter of the peer's environment"
    )
    args = parser.parse_args(argv)
    model, work = resolve_model(MODEL), ROOT / "checkpoints" / "benchmarks" / "losses"
    rows, adapter = work / "rows.jsonl", work / "adapter"
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    warmup = args.steps // 20
    words = {"model": model, "gsm8k": args.gsm8k, "steps": args.steps, "warmup": warmup}
    words |= {"length": args.max_length, "source": args.max_length // 2}
    keys = shlex.split(f"{LORA_KEYS} {KEYS}".format(**words))
    export = ("-m", "benchmarks.export_rows", rows, "--adapter", adapter)
    run(sys.executable, *export, *keys, "--output_dir", work / "fp32")

    losses = {}
    reason = not_offered(BF16_KEYS)
    if reason is not None:
        print(f"no bf16 curve: {reason}")
    for name, more in {"fp32": "", **({} if reason else {"bf16": BF16_KEYS})}.items():
        run(sys.executable, "llm/run_finetune.py", *keys, *shlex.split(more), "--output_dir", work / name)
        losses[f"this project, {name}"] = read_losses(work / name / "metrics.jsonl")
    for dtype in ("float32", "bfloat16"):
        out = work / f"peer_{dtype}.jsonl"
        shared = ("--learning_rate", LEARNING_RATE, "--warmup_steps", warmup, "--adapter", adapter, "--losses", out)
        run(args.python, "-m", "benchmarks.peers.train_rows", rows, model, "--dtype", dtype, *shared)
        losses[f"transformers + peft, {dtype}"] = read_losses(out)

    draw(losses, args.out / "losses.png")
    lines = describe(losses)
    print("\n".join(lines))
    content = {"environment": environment("paddlepaddle"), "tokens": args.max_length, "summary": lines}
    (args.out / "losses.json").write_text(json.dumps({**content, "losses": losses}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
