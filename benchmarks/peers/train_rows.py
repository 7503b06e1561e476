"""Train on exported rows (benchmarks/export_rows.py) in transformers + peft on PyTorch: the loss curve to compare with.

    python benchmarks/peers/train_rows.py ROWS.jsonl MODEL_FOLDER OUT.jsonl --method lora --learning_rate 3e-4

MODEL_FOLDER holds the same weights in Hugging Face layout. Each optimizer step takes one line of ROWS, in padded
micro-batches; the loss is the sum over learned tokens divided by their number in the whole step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import report


def learning_rate_factor(step: int, total: int, warmup: int, schedule: str) -> float:
    """The schedules of paddlenlp_ext/train/schedule.py, by formula."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}[schedule]


def collate(documents: list[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, attention mask and labels of one micro-batch."""
    longest = max(len(document["tokens"]) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        tokens, learned = torch.tensor(document["tokens"]), torch.tensor(document["learned"], dtype=torch.bool)
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(learned, tokens, -100)
    return ids, mask, labels


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--schedule", choices=["linear", "cosine", "constant"], default="linear")
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--micro_batch", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.method == "lora":
        model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, weight_decay=0.0)
    steps = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    tokens_done, start = 0, time.perf_counter()
    with args.out.open("w", encoding="utf-8") as out:
        for number, documents in enumerate(steps):
            factor = learning_rate_factor(number, len(steps), args.warmup_steps, args.schedule)
            optimizer.param_groups[0]["lr"] = args.learning_rate * factor
            learned = sum(sum(document["learned"][1:]) for document in documents)
            loss_of_step = 0.0
            for first in range(0, len(documents), args.micro_batch):
                ids, mask, labels = collate(documents[first : first + args.micro_batch])
                outputs = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=learned)
                outputs.loss.backward()
                loss_of_step += outputs.loss.item()
            torch.nn.utils.clip_grad_norm_(trainable, args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            tokens_done += sum(len(document["tokens"]) - 1 for document in documents)
            seconds = time.perf_counter() - start
            out.write(json.dumps({"step": number + 1, "loss": loss_of_step, "seconds": seconds}) + "\n")
            out.flush()
    figures = {"method": args.method, "steps": len(steps), "tokens_per_second": round(tokens_done / seconds, 1)}
    report("peer_train_rows", figures, "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
