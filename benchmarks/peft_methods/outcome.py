"""Results of the runs: figures of one run, and for each method the run with the best learning rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GB, _MB = 1e9, 1e6


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One finished run of a task.

    Attributes:
        score: exact match on the eval rows; None if no answers were generated.
        loss: loss on the eval rows, per target token.
        file_mb: size of the run's safetensors files in MB (10^6 bytes).
    """

    task: str
    method: str
    learning_rate: float
    score: float | None
    loss: float
    train_loss: float
    trainable_parameters: int
    num_tokens: int
    file_mb: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Speed and memory of a method, from a run on an otherwise idle machine."""

    method: str
    tokens_per_second: float
    peak_memory_gb: float


def read_outcome(folder: Path, task: str, method: str, learning_rate: float) -> Outcome:
    """Return the figures in a run's files."""
    train, evaluation = _read(folder / "train_results.json"), _read(folder / "eval_results.json")
    return Outcome(
        task=task,
        method=method,
        learning_rate=learning_rate,
        score=evaluation.get("eval_exact_match"),
        loss=evaluation["eval_loss"],
        train_loss=train["train_loss"],
        trainable_parameters=int(train["trainable_parameters"]),
        num_tokens=int(train["num_tokens"]),
        file_mb=round(sum(file.stat().st_size for file in folder.glob("*.safetensors")) / _MB, 3),
    )


def read_cost(folder: Path, method: str) -> Cost:
    """Return speed and memory from a run's files."""
    train = _read(folder / "train_results.json")
    return Cost(
        method=method,
        tokens_per_second=round(train["train_tokens_per_second"], 1),
        peak_memory_gb=round(train["peak_memory_bytes"] / _GB, 3),
    )


def best_of_each(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the run with the lowest eval loss for each method, in the order of the runs of one task; NaN is worst.

    Raises:
        ValueError: the token counts of the runs differ, so the runs cannot be compared.
    """
    if len({outcome.num_tokens for outcome in outcomes}) > 1:
        counts = ", ".join(sorted({f"{outcome.num_tokens:,}" for outcome in outcomes}))
        raise ValueError(
            f"the runs were trained on different token counts ({counts}); train all runs with the same settings"
        )
    best: dict[str, Outcome] = {}
    for outcome in outcomes:
        known = best.get(outcome.method)
        if known is None or outcome.loss < known.loss or known.loss != known.loss:
            best[outcome.method] = outcome
    return list(best.values())


def _read(file: Path) -> dict[str, float]:
    return json.loads(file.read_text(encoding="utf-8"))
