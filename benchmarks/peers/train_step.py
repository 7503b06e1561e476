"""The step of benchmarks/train_step.py in transformers + peft on PyTorch, for the ratio.

In an environment of its own: pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import SMOLLM2_SHAPE, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learned", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = {key: value for key, value in SMOLLM2_SHAPE.items() if key != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, args.dtype))
    if args.method == "lora":
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    input_ids = torch.randint(0, SMOLLM2_SHAPE["vocab_size"], (args.documents, args.length))
    labels = torch.where(torch.rand(input_ids.shape) < args.learned, input_ids, -100)

    def step() -> None:
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    seconds = (time.perf_counter() - start) / args.steps
    tokens = args.documents * args.length
    figures = {**vars(args), "tokens_per_second": round(tokens / seconds, 1)}
    report("peer_train_step", figures, "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
