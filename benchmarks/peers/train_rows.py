"""Train on exported rows (benchmarks/export_rows.py) in transformers + peft on PyTorch: speed, memory and losses.

    .venv-peers/bin/python -m benchmarks.peers.train_rows ROWS.jsonl MODEL_FOLDER --learning_rate 3e-4 [--losses OUT]

MODEL_FOLDER has the same weights in Hugging Face layout. Each optimizer step takes one line of ROWS, in padded
micro-batches; the loss is the sum over the target tokens of the step, divided by the number of target tokens. Speed
counts tokens without padding, from the second step on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.measure import report, tokens_per_second


def learning_rate_factor(step: int, total: int, warmup: int, schedule: str) -> float:
    """Return the factor of the learning rate, by the formulas of paddlenlp_ext/trainer/lr_scheduler.py."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}[schedule]


def collate(documents: list[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return right-padded ids, attention mask and labels of one micro-batch."""
    longest = max(len(document["tokens"]) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        tokens, is_target = torch.tensor(document["tokens"]), torch.tensor(document["learned"], dtype=torch.bool)
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(is_target, tokens, -100)
    return ids, mask, labels


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("model")
    parser.add_argument("--losses", type=Path, help="write one JSON line per step to this file")
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--adapter", help="start from this LoRA adapter instead of a new adapter")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--schedule", choices=["linear", "cosine", "constant"], default="linear")
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, help="number of timed steps, after an untimed step; default: one step per line of ROWS"
    )
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model in training mode, with its adapter."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    if args.adapter:
        model = PeftModel.from_pretrained(model, args.adapter, is_trainable=True)
    elif args.method == "lora":
        model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
    return model.train()


def main() -> None:
    args = parse_arguments()
    model = build_model(args)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, weight_decay=0.0)
    steps = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    seconds, losses = [], []
    for number, documents in enumerate(steps[: args.steps and args.steps + 1]):
        start = time.perf_counter()
        factor = learning_rate_factor(number, len(steps), args.warmup_steps, args.schedule)
        optimizer.param_groups[0]["lr"] = args.learning_rate * factor
        num_target_tokens = sum(sum(document["learned"][1:]) for document in documents)
        loss_of_step = 0.0
        for first in range(0, len(documents), args.micro_batch):
            ids, mask, labels = collate(documents[first : first + args.micro_batch])
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=num_target_tokens)
            outputs.loss.backward()
            loss_of_step += outputs.loss.item()
        torch.nn.utils.clip_grad_norm_(trainable, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss_of_step)
        if args.losses:
            with args.losses.open("a" if number else "w", encoding="utf-8") as out:
                out.write(json.dumps({"step": number + 1, "loss": loss_of_step, "seconds": seconds[-1]}) + "\n")
    tokens = [sum(len(document["tokens"]) - 1 for document in documents) for documents in steps[: len(seconds)]]
    settings = {key: getattr(args, key) for key in ("method", "rank", "dtype", "micro_batch")}
    figures = tokens_per_second(tokens[1:], seconds[1:])
    report("peer_train_rows", {**settings, **figures, "losses": losses}, "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
