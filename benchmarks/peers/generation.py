"""Generation benchmark of benchmarks/generation.py in transformers on PyTorch.

    .venv-peers/bin/python -m benchmarks.peers.generation MODEL_FOLDER [--batch 1 --dtype float32|bfloat16]

Every row reaches the maximum length.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import random_documents, report, time_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    prompts = torch.from_numpy(random_documents(args.batch, args.prompt))
    mask = torch.ones_like(prompts)

    def step() -> None:
        rows = model.generate(
            prompts, attention_mask=mask, do_sample=False, min_new_tokens=args.new, max_new_tokens=args.new
        )
        assert rows.shape == (args.batch, args.prompt + args.new)

    figures = time_steps(step, args.steps, args.batch * args.new)
    report("peer_generation", {**vars(args), **figures}, "torch", "transformers")


if __name__ == "__main__":
    main()
