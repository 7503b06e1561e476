"""Plot the loss curves of several runs in one figure and print their differences.

    python -m benchmarks.compare_losses OUT.png "ours=run/metrics.jsonl" "peer=peer.jsonl" ...

Each file has one JSON object per line; objects without `step` and `loss` are ignored. Differences are
relative to the first run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from paddlenlp_ext.utils.run_command import run_command

Losses = Mapping[int, float]
"""Training loss by optimizer step."""


def read_losses(path: str | Path) -> Losses:
    """Return the losses of a metrics.jsonl by step."""
    entries = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def differences(first: Losses, other: Losses) -> Losses:
    """Return (other - first) / first at each step that both runs have."""
    return {step: other[step] / first[step] - 1 for step in sorted(first.keys() & other.keys())}


def draw(runs: Mapping[str, Losses], target: str | Path) -> None:
    """Plot the curves in one panel, and below it their differences from the first curve in percent."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    first = next(iter(runs.values()))
    for number, (name, losses) in enumerate(runs.items()):
        curves.plot(list(losses), list(losses.values()), label=name, linestyle="-" if number % 2 == 0 else "--")
        percent = {step: 100 * difference for step, difference in differences(first, losses).items()}
        apart.plot(list(percent), list(percent.values()), linewidth=0.9)
    curves.set_ylabel("loss per target token")
    curves.legend()
    apart.set_ylabel("difference from the first, %")
    apart.set_xlabel("optimizer step")
    for axes in (curves, apart):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=130)


def describe(runs: Mapping[str, Losses]) -> list[str]:
    """Return one line per run: the mean of the last ten losses, and its difference from the first run."""
    first = next(iter(runs.values()))
    lines = []
    for name, losses in runs.items():
        apart = [abs(difference) for difference in differences(first, losses).values()]
        last = [losses[step] for step in sorted(losses)[-10:]]
        mean, largest = sum(apart) / len(apart), max(apart)
        lines.append(
            f"{name:32s} mean of the last 10: {sum(last) / len(last):.4f}   "
            f"difference from the first: {mean:.3%} on average, {largest:.3%} at most"
        )
    return lines


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2 or not all("=" in run for run in argv[1:]):
        raise ValueError(f"expected OUT.png NAME=FILE ..., got {list(argv)}")
    target, *named = argv
    runs = {name: read_losses(path) for name, path in (run.split("=", 1) for run in named)}
    draw(runs, target)
    print("\n".join(describe(runs)))


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
