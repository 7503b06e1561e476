"""Gradient precision in transformers + peft on PyTorch, with the rows and adapter of benchmarks/gradient_precision.py.

    .venv-peers/bin/python -m benchmarks.peers.gradient_precision FOLDER MODEL_FOLDER

FOLDER is the output of `python -m benchmarks.gradient_precision --export FOLDER`. The model is in bfloat16 and the
adapter in float32, PEFT's default.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.gradient_distance import distances
from benchmarks.measure import report
from benchmarks.peers.train_rows import collate


def gradients(args: argparse.Namespace, dtype: torch.dtype) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss per target token and the gradient of every trainable parameter."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model = PeftModel.from_pretrained(model, args.folder, is_trainable=True).train()
    documents = json.loads((args.folder / "rows.jsonl").read_text(encoding="utf-8"))
    ids, mask, labels = collate(documents)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return loss.item(), {name: parameter.grad.float().numpy() for name, parameter in trainable.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with rows.jsonl and the adapter")
    parser.add_argument("model", help="Hugging Face folder")
    args = parser.parse_args()
    loss, exact = gradients(args, torch.float32)
    loss_bf16, rounded = gradients(args, torch.bfloat16)
    figures = {"loss_float32": loss, "loss_bfloat16": loss_bf16, **distances(rounded, exact)}
    report("peer_gradient_precision", figures, "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
