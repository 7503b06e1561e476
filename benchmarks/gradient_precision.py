"""Error of the gradients of a step in bf16, relative to the same step in fp32.

    python -m benchmarks.gradient_precision [--documents 8] [--dataset_name_or_path FOLDER --lora_rank 8]
    python -m benchmarks.gradient_precision --export FOLDER         # then, for the peer on the same rows and adapter:
    .venv-peers/bin/python -m benchmarks.peers.gradient_precision FOLDER MODEL_FOLDER

LoRA trains the built-in model on rows of a dataset. B is random, so that A has gradients too. The error of a gradient
is the norm of its difference from the fp32 gradient, divided by the norm of the fp32 gradient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.gradient_distance import distances
from benchmarks.measure import report
from benchmarks.ours import not_offered, run_config
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import PackedBatch, collate
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.trainer.forward_backward import loss_sum
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.train_step import autocast
from paddlenlp_ext.utils.run_command import run_command

BF16 = ["--bf16", "true"]


def started_model(config: RunConfig) -> Any:
    """Build the model of the run in training mode, with random B."""
    model = build_model(ModelSource.from_config(config.model), config).model
    model.train()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(0.01 * rng.standard_normal(parameter.shape, np.float32))
    return model


def gradients(config: RunConfig, batch: PackedBatch) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss per target token and the gradient of every trainable parameter."""
    model = started_model(config)
    with autocast(config.precision):
        loss = loss_sum(model, batch)[0] / batch.num_target_tokens
    loss.backward()
    trainable = {name: parameter for name, parameter in model.named_parameters() if not parameter.stop_gradient}
    return float(loss), {name: parameter.grad.astype("float32").numpy() for name, parameter in trainable.items()}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--export", type=Path, help="also write the rows and the adapter, for the peer")
    args, more = parser.parse_known_args(argv)
    reason = not_offered(" ".join(BF16))
    if reason is not None:
        raise ValueError(f"there is nothing to compare: {reason}")
    keys = ["--lora", "true", "--src_length", "256", "--max_length", "512", *more]
    loaded = load_data(run_config(keys)).train_rows
    rows = [loaded[index] for index in range(args.documents)]
    if args.export:
        started_model(run_config(keys)).save_pretrained(args.export)
        documents = [{"tokens": row.tokens.tolist(), "learned": row.loss_mask.astype(int).tolist()} for row in rows]
        (args.export / "rows.jsonl").write_text(json.dumps(documents) + "\n", encoding="utf-8")
    batch = collate([rows])
    loss, exact = gradients(run_config(keys), batch)
    loss_bf16, rounded = gradients(run_config([*keys, *BF16]), batch)
    figures = {"keys": keys, "tokens": batch.num_tokens, "loss_float32": loss, "loss_bfloat16": loss_bf16}
    report("gradient_precision", {**figures, **distances(rounded, exact)}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
