"""Time and memory of a step by pack length, number of documents, LoRA rank and number of cores.

    python -m benchmarks.scaling [--only pack batch rank cores] [--steps 3] [--out FOLDER] [--bf16 true ...]

Each point is benchmarks/train_step.py in a separate process: LoRA of rank 8 on SmolLM2's shape, 4 documents of 512
tokens, except for the quantity that the series changes. Further keys go to every run. Writes scaling.json, scaling.md
and scaling.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import ROOT
from benchmarks.measure import environment
from paddlenlp_ext.utils.run_command import run_command

SERIES: dict[str, tuple[str, tuple[int, ...], str]] = {
    # name: label of the axis, its values, arguments that a value adds to the command
    "pack": ("tokens of one document", (512, 1024, 2048, 4096, 8192), "--documents 1 --length {value}"),
    "batch": ("documents of 512 tokens", (1, 2, 4, 8, 16), "--documents {value} --length 512"),
    "rank": ("rank, 4 x 512 tokens", (8, 16, 32, 64, 128, 256), "--lora_rank {value}"),
    "cores": ("cores, 4 x 512 tokens", (1, 2), ""),
}

Points = dict[str, dict[int, dict[str, Any]]]
"""Series -> value -> JSON line of the measurement."""


def measure_point(series: str, value: int, steps: int, keys: Sequence[str]) -> dict[str, Any]:
    """Return the JSON line of one process."""
    cores = sorted(os.sched_getaffinity(0))
    if series == "cores" and value > len(cores):
        raise ValueError(f"series cores: {value} cores requested, but this process may use {len(cores)}")
    allowed = set(cores[:value]) if series == "cores" else set(cores)
    words = shlex.split(SERIES[series][2].format(value=value))
    command = [sys.executable, "-m", "benchmarks.train_step", "--lora", "true", "--steps", steps, *words, *keys]
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),  # _runtime.py starts as many threads as cores
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, command))} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def markdown(points: Points) -> str:
    """Return one table with a row per point."""
    lines = ["| | | tokens/s | peak memory |", "|---|---|---|---|"]
    for series, values in points.items():
        for value, figures in values.items():
            rate, memory = figures["tokens_per_second"], figures["peak_memory_gb"]
            lines.append(f"| {SERIES[series][0]} | {value:,} | {rate:,.0f} | {memory:.2f} GB |")
    facts = "; ".join(f"{key} {value}" for key, value in environment("paddlepaddle").items())
    return "\n".join([*lines, "", f"{facts}."]) + "\n"


def draw(points: Points, file: Path) -> None:
    """Plot one column per series: tokens/s above, memory below."""
    figure = Figure(figsize=(3.2 * len(points), 5), layout="constrained")
    axes = figure.subplots(2, len(points), sharey="row", squeeze=False)
    rows = (("tokens_per_second", "tokens/s"), ("peak_memory_gb", "peak memory, GB"))
    for column, (series, values) in enumerate(points.items()):
        for row, (key, title) in enumerate(rows):
            panel = axes[row][column]
            panel.plot(list(values), [figures[key] for figures in values.values()], marker="o")
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(values), [str(value) for value in values])
            panel.grid(alpha=0.3)
            if column == 0:
                panel.set_ylabel(title)
        axes[1][column].set_xlabel(SERIES[series][0])
    for row in axes:
        row[0].set_ylim(bottom=0)  # The panels of a row share this limit, so it is set after the last curve.
    figure.savefig(file, dpi=130)


def write(folder: Path, points: Points) -> None:
    """Write the three files with the finished series."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.json").write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    (folder / "scaling.md").write_text(f"# Speed and memory by size\n\n{markdown(points)}", encoding="utf-8")
    draw(points, folder / "scaling.png")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SERIES, default=list(SERIES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints" / "benchmarks")
    args, keys = parser.parse_known_args(argv)
    points: Points = {}
    for series in args.only:
        for value in SERIES[series][1]:
            figures = measure_point(series, value, args.steps, keys)
            points.setdefault(series, {})[value] = figures
            rate, memory = figures["tokens_per_second"], figures["peak_memory_gb"]
            print(f"{SERIES[series][0]} {value}: {rate} tokens/s, {memory} GB", flush=True)
        write(args.out, points)
    print(f"written: {args.out}")


if __name__ == "__main__":
    run_command(main)
