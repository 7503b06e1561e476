"""Samples per second and peak memory of GRPO, in this project and in TRL, on the same prompts.

    python -m benchmarks.grpo MODEL_FOLDER ROWS.jsonl [--steps 3 --prompts 8 --micro_batch 16] [--key value ...]
    python -m benchmarks.grpo MODEL_FOLDER ROWS.jsonl --peer .venv-peers/bin/python [--rounds 3] [--steps 3 ...]

Rows have a question (src) and its answer (tgt). The reward is 1 if the last number of the completion
equals the answer. A sample is a completion. The first step is not timed. Further keys are keys of llm/run_grpo.py.
With `--peer`, this project and TRL (benchmarks/peers/grpo.py) run in turn in separate processes, and a table compares
them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks import ROOT, STARTED_WITH
from benchmarks.grpo_options import add_sizes, num_samples, parser_of_inputs, run_keys
from benchmarks.measure import report, sample_rates
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.run_config import GRPO_SECTIONS
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.trainer_state import StepReport
from paddlenlp_ext.utils.run_command import run_command

KEYS = {
    **dict.fromkeys(("do_train", "overwrite_output_dir", "disable_tqdm", "lora"), "true"),
    "reward_funcs": "exact_answer",
    "reward_answer_column": "reference",
    "device": "cpu",
}


class Steps(Callback):
    """Callback that collects the times at which steps end, and their metrics."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, state: object, report: StepReport) -> None:
        self.ends.append(time.perf_counter())
        self.metrics.append(report.metrics)


def measure(args: argparse.Namespace, keys: Sequence[str]) -> None:
    """Run the steps in this process, and print one JSON line."""
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        own = {
            **KEYS,
            **run_keys(args),
            "model_name_or_path": args.model,
            "train_dataset_path": args.rows,
            "output_dir": f"{folder}/run",
            "lora_rank": args.rank,
            "lora_alpha": 2 * args.rank,
        }
        words = [str(word) for key, value in own.items() for word in (f"--{key}", value)]
        config = load_run_config([*words, *keys], peft_methods(), GRPO_SECTIONS)
        build_trainer(config, load_data(config), [steps]).train()
    figures = sample_rates(num_samples(args), steps.ends, [each["completions/mean_length"] for each in steps.metrics])
    figures["sampling_seconds"] = [round(each["sampling/seconds"], 3) for each in steps.metrics[1:]]
    figures["rewards"] = [each["reward"] for each in steps.metrics]
    report("grpo", {**vars(args), "rows": str(args.rows), "keys": keys, **figures}, "paddlepaddle")


def compare(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Run this project and TRL in turn, and print each line and a table of medians."""
    programs = {"this project": (sys.executable, "benchmarks.grpo"), "TRL": (args.peer, "benchmarks.peers.grpo")}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, (python, module) in programs.items():
            command = [python, "-m", module, args.model, str(args.rows), *words]
            done = subprocess.run(command, cwd=ROOT, env=STARTED_WITH, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout.splitlines()[-1], flush=True)
            lines[name].append(json.loads(done.stdout.splitlines()[-1]))
    columns = ("samples_per_second", "tokens_per_second", "peak_memory_gb")
    medians = {name: [statistics.median(line[key] for line in own) for key in columns] for name, own in lines.items()}
    ratios = [one / other for one, other in zip(medians["this project"], medians["TRL"], strict=True)]
    print("| program | samples/s | tokens/s | peak memory |\n|---|---|---|---|")
    for name, (samples, tokens, memory) in medians.items():
        print(f"| {name} | {samples:.2f} | {tokens:.0f} | {memory:.2f} GB |")
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} | {ratios[2]:.2f} |")


def main(argv: Sequence[str]) -> None:
    parser = parser_of_inputs(__doc__)
    parser.add_argument("--peer", help="Python interpreter with TRL")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds with --peer")
    arguments, sizes = parser.parse_known_args(argv)
    add_sizes(parser)
    args, keys = parser.parse_known_args(argv)
    if arguments.peer is None:
        measure(args, keys)
    else:
        compare(arguments, sizes)


if __name__ == "__main__":
    run_command(main)
