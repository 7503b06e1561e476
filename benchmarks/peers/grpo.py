"""GRPO on the prompts of benchmarks/grpo.py in TRL on PyTorch.

    .venv-peers/bin/python -m benchmarks.peers.grpo MODEL_FOLDER ROWS.jsonl [--steps 3 --prompts 8 --micro_batch 16]

A sample is a completion. The first step is not timed.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("rows", type=Path, help="JSON Lines with src and tgt")
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps, after an untimed step")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts in a step")
    parser.add_argument("--generations", type=int, default=8, help="number of completions of a prompt")
    parser.add_argument("--micro_batch", type=int, default=16, help="number of completions in a micro-batch")
    parser.add_argument("--length", type=int, default=40, help="maximum number of tokens in a completion")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, which is TRL's default")
    args = parser.parse_args()

    lines = map(json.loads, args.rows.read_text(encoding="utf-8").splitlines())
    rows = [{"prompt": [{"role": "user", "content": row["src"]}], "tgt": row["tgt"]} for row in lines]
    samples, steps = args.prompts * args.generations, Steps()
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            num_generations=args.generations,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=samples // args.micro_batch,
            max_completion_length=args.length,
            max_steps=args.steps + 1,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=args.checkpointing,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
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
    figures = sample_rates(samples, steps.ends, [log["completions/mean_length"] for log in steps.logs])
    figures["rewards"] = [log["reward"] for log in steps.logs]
    report("peer_grpo", {**vars(args), "rows": str(args.rows), **figures}, "torch", "transformers", "peft", "trl")


if __name__ == "__main__":
    main()
