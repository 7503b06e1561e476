"""Leak between the documents of a pack in transformers, on a model of benchmarks/packing_leak.py.

    .venv-peers/bin/python -m benchmarks.peers.packing_leak MODEL_FOLDER [--attention eager]

The pack comes from DataCollatorWithFlattening with its default options. As in the Trainer, the model has no cache; with
a cache, transformers does not mask the other documents.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from benchmarks.leak import Documents, Pass, measure_leak
from benchmarks.measure import report


def leak_of(model: torch.nn.Module) -> dict[str, float | int]:
    """Return the result of `measure_leak` for a model of transformers."""
    model.train()
    collate = DataCollatorWithFlattening(return_tensors="pt")

    def run(documents: Documents) -> Pass:
        embeddings = []

        def keep(layer: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            output.retain_grad()
            embeddings.append(output)

        hook = model.get_input_embeddings().register_forward_hook(keep)
        batch = collate([{"input_ids": document.tolist()} for document in documents])
        labels = batch.pop("labels")[0]
        logits_SV = model(**batch, use_cache=False).logits[0]
        hook.remove()
        torch.nn.functional.cross_entropy(logits_SV[:-1], labels[1:], reduction="sum").backward()
        weights = {name: _gradient(each) for name, each in model.named_parameters() if each.requires_grad}
        model.zero_grad()
        return Pass(logits_SV.detach().numpy(), _gradient(embeddings[0])[0], weights)

    return measure_leak(run, model.config.vocab_size)


def _gradient(x: torch.Tensor) -> np.ndarray:
    """Return the gradient of a tensor; zeros for a tensor that does not affect the loss."""
    return np.zeros(x.shape, np.float32) if x.grad is None else x.grad.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--attention", choices=["sdpa", "eager"], help="unset: the default of transformers")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=args.attention)
    figures = {**leak_of(model), "attention": model.config._attn_implementation}
    report("peer_packing_leak", figures, "torch", "transformers")


if __name__ == "__main__":
    main()
