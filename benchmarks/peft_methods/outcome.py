"""What came of the runs: one line a run, the best learning rate of each method, and these as CSV, Markdown, picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from matplotlib.figure import Figure

_GB, _MB = 1e9, 1e6


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One finished run.

    Attributes:
        score: exact match on the dev rows; None where no answers were generated.
        loss: on the dev rows, per learned token.
        file_mb: safetensors that the run left.
    """

    method: str
    learning_rate: float
    score: float | None
    loss: float
    train_loss: float
    trainable_parameters: int
    peak_memory_gb: float
    tokens_per_second: float
    num_tokens: int
    file_mb: float


def read_outcome(folder: Path, method: str, learning_rate: float) -> Outcome:
    """The figures that a run's files give."""
    train = json.loads((folder / "train_results.json").read_text(encoding="utf-8"))
    dev = json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))
    return Outcome(
        method=method,
        learning_rate=learning_rate,
        score=dev.get("eval_exact_match"),
        loss=dev["eval_loss"],
        train_loss=train["train_loss"],
        trainable_parameters=train["trainable_parameters"],
        peak_memory_gb=round(train["peak_memory_bytes"] / _GB, 3),
        tokens_per_second=round(train["train_tokens_per_second"], 1),
        num_tokens=train["num_tokens"],
        file_mb=round(sum(file.stat().st_size for file in folder.glob("*.safetensors")) / _MB, 3),
    )


def best_of_each(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of each method, in the order of the runs, the one whose dev loss is lowest (NaN loses).

    Raises:
        ValueError: the runs did not see the same number of tokens, so that they can't be compared.
    """
    if len({outcome.num_tokens for outcome in outcomes}) > 1:
        counts = ", ".join(sorted({f"{outcome.num_tokens:,}" for outcome in outcomes}))
        raise ValueError(f"the runs saw different numbers of tokens ({counts}): run them all again with one setting.")
    best: dict[str, Outcome] = {}
    for outcome in outcomes:
        known = best.get(outcome.method)
        if known is None or outcome.loss < known.loss or known.loss != known.loss:
            best[outcome.method] = outcome
    return list(best.values())


def write_outcomes(folder: Path, outcomes: Sequence[Outcome], facts: dict[str, object]) -> None:
    """runs.csv with every run; table.csv, table.md and table.png with the best of each method."""
    best = best_of_each(outcomes)
    _write_csv(folder / "runs.csv", outcomes)
    _write_csv(folder / "table.csv", best)
    (folder / "table.md").write_text(markdown(best, facts), encoding="utf-8")
    draw(best, folder / "table.png")


def markdown(best: Sequence[Outcome], facts: dict[str, object]) -> str:
    """The table, best score (or else loss) first, under what it was measured with."""
    headings = "Method | Score | Dev loss | Trained parameters | Peak memory | Tokens/s | File | Learning rate"
    lines = [f"{name}: {value}  " for name, value in facts.items()]
    lines += ["", f"| {headings} |", "| --- |" + " ---: |" * headings.count("|")]
    for one in _ranked(best):
        score = "" if one.score is None else f"{one.score:.1%}"
        cells = (one.method, score, f"{one.loss:.4f}", f"{one.trainable_parameters:,}", f"{one.peak_memory_gb:.2f} GB")
        more = (f"{one.tokens_per_second:,.0f}", f"{one.file_mb:.3g} MB", f"{one.learning_rate:.3g}")
        lines.append(f"| {' | '.join((*cells, *more))} |")
    return "\n".join(lines) + "\n"


def draw(best: Sequence[Outcome], path: Path) -> None:
    """One row a method, the best at the top; side by side score, dev loss, trained parameters and speed."""
    rows = _ranked(best)[::-1]
    panels: dict[str, list[float]] = {
        "exact match, %": [100 * (one.score or 0.0) for one in rows],
        "dev loss": [one.loss for one in rows],
        "trained parameters": [one.trainable_parameters for one in rows],
        "tokens per second": [one.tokens_per_second for one in rows],
    }
    if all(one.score is None for one in rows):
        del panels["exact match, %"]
    figure = Figure(figsize=(3 * len(panels) + 1, 1 + 0.26 * len(rows)), dpi=120, layout="constrained")
    for axes, (label, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        axes.plot(values, range(len(rows)), "o", color="#08519c", markersize=5)
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if label == "trained parameters":
            axes.set_xscale("log")
        axes.set_yticks(range(len(rows)), [one.method for one in rows], fontsize=8)
    figure.savefig(path)


def _ranked(best: Sequence[Outcome]) -> list[Outcome]:
    """The highest score first; the lower loss first among equals."""
    return sorted(best, key=lambda one: (-(one.score or 0.0), one.loss))


def _write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)])
        writer.writeheader()
        writer.writerows(asdict(outcome) for outcome in outcomes)
