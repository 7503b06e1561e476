"""DPO on the pairs of benchmarks/preference.py in TRL on PyTorch.

    .venv-peers/bin/python -m benchmarks.peers.preference MODEL_FOLDER [--pairs 8 --prompt 384 --answer 64 --steps 3]

Speed counts every pair as two sequences, each with its prompt; the first step is not timed. With `--precompute` the
reference model's log-probabilities are computed before training, as in this project; without `--precompute`, they
are computed in every step, as TRL does by default.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from benchmarks.measure import num_pair_tokens, random_pairs, report, tokens_per_second


class TokenizedPairs(DPOTrainer):
    """TRL's trainer for rows that are already tokenized."""

    def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
        return dataset


class StepTimes(TrainerCallback):
    """Callback that collects the times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro_batch", type=int, default=2, help="number of pairs in a forward and backward pass")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--precompute", action="store_true")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    pairs = random_pairs(args.pairs, args.prompt, args.answer, min(model.config.vocab_size, len(tokenizer)))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        options = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.pairs // args.micro_batch,
            max_steps=args.steps + 1,
            learning_rate=1e-4,
            max_length=None,
            gradient_checkpointing=False,
            precompute_ref_log_probs=args.precompute,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
        trainer = TokenizedPairs(
            model=model,
            args=options,
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[times],
        )
        trainer.train()
    seconds = [end - start for start, end in zip(times.ends, times.ends[1:], strict=False)]
    figures = tokens_per_second([sum(map(num_pair_tokens, pairs))] * len(seconds), seconds)
    report("peer_preference", {**vars(args), **figures}, "torch", "transformers", "peft", "trl")


if __name__ == "__main__":
    main()
