"""How far the gradients of a bf16 step are from those of the same step in fp32.

    python benchmarks/gradient_precision.py [--documents 8] [--dataset_name_or_path FOLDER --lora_rank 8]

LoRA on the built-in model and rows of a dataset, B drawn at random so that A has gradients too. The distance of two
gradients is the norm of their difference over the norm of the fp32 one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import paddlenlp_ext  # noqa: F401 (before Paddle: its import sets the process up)
from measure import report
from ours import not_offered, run_config
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.batch import PackedBatch, collate
from paddlenlp_ext.train.build import build_model, load_data
from paddlenlp_ext.train.loss import loss_sum
from paddlenlp_ext.train.precision import autocast
from paddlenlp_ext.utils.cli import run_command

BF16 = ["--bf16", "true"]


def gradients(config: RunConfig, batch: PackedBatch) -> tuple[float, dict[str, np.ndarray]]:
    """The loss per learned token and the gradient of every trainable parameter."""
    model = build_model(config)
    model.train()
    rng = np.random.default_rng(0)
    trainable = {name: parameter for name, parameter in model.named_parameters() if not parameter.stop_gradient}
    for name, parameter in trainable.items():
        if "lora_B" in name:
            parameter.set_value(0.01 * rng.standard_normal(parameter.shape, np.float32))
    with autocast(config.precision):
        loss = loss_sum(model, batch)[0] / batch.num_learned
    loss.backward()
    found = {name: parameter.grad.astype("float32").numpy() for name, parameter in trainable.items()}
    return float(loss), found


def distance(one: np.ndarray, reference: np.ndarray) -> float:
    """Relative, in the Euclidean norm, summed in float64."""
    exact = reference.astype(np.float64)
    return float(np.linalg.norm(one - exact) / np.linalg.norm(exact))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    args, more = parser.parse_known_args(argv)
    reason = not_offered(" ".join(BF16))
    if reason is not None:
        raise ValueError(f"there is nothing to compare: {reason}")
    keys = ["--lora", "true", "--src_length", "256", "--max_length", "512", *more]
    rows = load_data(run_config(keys)).train_rows
    batch = collate([[rows[index] for index in range(args.documents)]])
    loss, exact = gradients(run_config(keys), batch)
    loss_bf16, rounded = gradients(run_config([*keys, *BF16]), batch)
    distances = {name: distance(rounded[name], exact[name]) for name in exact}
    whole = [np.concatenate([one[name].ravel() for name in exact]) for one in (rounded, exact)]
    figures = {
        "keys": keys,
        "tokens": batch.num_tokens,
        "loss_float32": loss,
        "loss_bfloat16": loss_bf16,
        "distance_of_all": distance(*whole),
        "median_distance": float(np.median(list(distances.values()))),
        "largest_distance": max(distances.values()),
        "farthest": max(distances, key=distances.__getitem__),
    }
    report("gradient_precision", figures, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
