"""Training step of benchmarks/train_step.py in transformers + peft on PyTorch.

    .venv-peers/bin/python -m benchmarks.peers.train_step MODEL_FOLDER [--method lora|full --dtype float32|bfloat16]

The adapter of a bfloat16 model is in float32, PEFT's default, as in this project.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.measure import random_documents, report, time_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learned", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    if args.method == "lora":
        lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
        model = get_peft_model(model, lora)
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)
    input_ids = torch.from_numpy(random_documents(args.documents, args.length))
    labels = torch.where(torch.rand(input_ids.shape) < args.learned, input_ids, -100)

    def step() -> None:
        model(input_ids=input_ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    figures = time_steps(step, args.steps, args.documents * args.length)
    report("peer_train_step", {**vars(args), **figures}, "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
