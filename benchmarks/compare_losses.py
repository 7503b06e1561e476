"""Draw the loss curves of several runs into one picture and print how far apart they are.

    python benchmarks/compare_losses.py OUT.png "ours=run/metrics.jsonl" "peer=peer.jsonl" ...

Each file has one JSON object a line; those with `step` and `loss` count. Differences are relative to the first run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from paddlenlp_ext.utils.cli import run_command


def read_losses(path: str) -> dict[int, float]:
    """Training loss by optimizer step."""
    entries = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2 or not all("=" in run for run in argv[1:]):
        raise ValueError(f"expected OUT.png NAME=FILE ..., got {list(argv)}")
    target, *named = argv
    runs = {name: read_losses(path) for name, path in (run.split("=", 1) for run in named)}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, losses) in enumerate(runs.items()):
        axes.plot(list(losses), list(losses.values()), label=name, linestyle="-" if number % 2 == 0 else "--")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss per learned token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=130)
    first = next(iter(runs.values()))
    for name, losses in runs.items():
        shared = sorted(first.keys() & losses.keys())
        differences = [abs(losses[step] - first[step]) / first[step] for step in shared]
        last = sum(losses[step] for step in shared[-10:]) / len(shared[-10:])
        print(f"{name:32s} mean of the last 10: {last:.4f}   largest difference to the first: {max(differences):.2%}")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
