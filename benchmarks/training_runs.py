"""Runs of llm/run_finetune.py whose results are compared; a run whose results are in its folder is not repeated."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT, STARTED_WITH

LAST = 50
"""Steps at the end of a run over which the training loss is averaged."""


@dataclass(frozen=True)
class RunFigures:
    """Results of a training run.

    Attributes:
        peak: largest resident size of the process in GB.
        file: size of the saved weights in GB.
        state: size of the optimizer state of the last checkpoint in GB; 0 without a checkpoint.
        seconds: mean seconds of a step.
        train: mean training loss of the last steps.
        evaluation: loss on the eval rows after the last step.
    """

    peak: float
    file: float
    state: float
    seconds: float
    train: float
    evaluation: float


def run_once(keys: str, folder: Path) -> RunFigures:
    """Train with the command line `keys`, unless the folder has the results, and return the figures."""
    if not (folder / "eval_results.json").exists():
        command = [sys.executable, "llm/run_finetune.py", *shlex.split(keys), "--output_dir", str(folder)]
        subprocess.run(command, cwd=ROOT, env=STARTED_WITH, check=True)
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    results = json.loads((folder / "train_results.json").read_text())
    states = sorted(folder.glob("checkpoint-*/training_state.safetensors"), key=lambda path: path.stat().st_mtime)
    return RunFigures(
        peak=results["peak_memory_bytes"] / 1e9,
        file=sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9,
        state=states[-1].stat().st_size / 1e9 if states else 0.0,
        seconds=1 / results["train_steps_per_second"],
        train=sum(losses[-LAST:]) / len(losses[-LAST:]),
        evaluation=json.loads((folder / "eval_results.json").read_text())["eval_loss"],
    )
