"""GRPO on the prompts of benchmarks/grpo.py in TRL on PyTorch.

    .venv-peers/bin/python -m benchmarks.peers.grpo MODEL_FOLDER ROWS.jsonl [--steps 3 --prompts 8 --micro_batch 16]

A sample is a completion. The first step is not timed.
"""

from __future__ import annotations

import json
import re
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.grpo_options import add_sizes, num_samples, parser_of_inputs, run_keys
from benchmarks.measure import report, sample_rates


class Steps(TrainerCallback):
    """Callback that collects the times at which steps end, and their logged metrics."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "reward" in logs:
            self.logs.append(logs)


def correct(completions: list[list[dict[str, str]]], tgt: list[str], **_: object) -> list[float]:
    """Return 1 for each completion whose last number equals the right answer, otherwise 0."""
    last = [re.findall(r"\d+", completion[-1]["content"])[-1:] for completion in completions]
    return [float(found == re.findall(r"\d+", answer)[-1:]) for found, answer in zip(last, tgt, strict=True)]


def main() -> None:
    parser = parser_of_inputs(__doc__)
    add_sizes(parser)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, which is TRL's default")
    args = parser.parse_args()

    lines = map(json.loads, args.rows.read_text(encoding="utf-8").splitlines())
    rows = [{"prompt": [{"role": "user", "content": row["src"]}], "tgt": row["tgt"]} for row in lines]
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            **run_keys(args),
            gradient_checkpointing=args.checkpointing,
            bf16=False,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            reward_funcs=correct,
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
            callbacks=[steps],
        )
        trainer.train()
    figures = sample_rates(num_samples(args), steps.ends, [log["completions/mean_length"] for log in steps.logs])
    figures["rewards"] = [log["reward"] for log in steps.logs]
    report("peer_grpo", {**vars(args), "rows": str(args.rows), **figures}, "torch", "transformers", "peft", "trl")


if __name__ == "__main__":
    main()
