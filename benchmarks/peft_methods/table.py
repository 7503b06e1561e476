"""Files of the comparison: every run as CSV, the best of each method as a Markdown table and a plot."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.peft_methods.outcome import Cost, Outcome, best_of_each


@dataclass(frozen=True)
class Line:
    """One method in the table: its best run of each task by the task's name, and its cost."""

    method: str
    best: Mapping[str, Outcome]
    cost: Cost | None

    @property
    def any_run(self) -> Outcome:
        """Return the run of the first task, for figures that are equal in all runs."""
        return next(iter(self.best.values()))

    def rank(self) -> tuple[float, ...]:
        """Return the sort key: the highest score of the first task first, then the lowest loss."""
        first = self.any_run
        return (-(first.score or 0.0), first.loss)


def write_outcomes(
    folder: Path, outcomes: Sequence[Outcome], costs: Sequence[Cost], facts: Mapping[str, object]
) -> str:
    """Write runs.csv (every run), costs.csv, table.md and table.png; return the text of table.md."""
    lines = table_lines(outcomes, costs)
    _write_csv(folder / "runs.csv", outcomes)
    if costs:
        _write_csv(folder / "costs.csv", costs)
    text = markdown(lines, facts)
    (folder / "table.md").write_text(text, encoding="utf-8")
    draw(lines, folder / "table.png")
    return text


def table_lines(outcomes: Sequence[Outcome], costs: Sequence[Cost]) -> list[Line]:
    """Return one line per method, the best first."""
    tasks = dict.fromkeys(outcome.task for outcome in outcomes)
    bests = {task: best_of_each([outcome for outcome in outcomes if outcome.task == task]) for task in tasks}
    of_method: dict[str, dict[str, Outcome]] = {}
    for task, best in bests.items():
        for outcome in best:
            of_method.setdefault(outcome.method, {})[task] = outcome
    cost_of = {cost.method: cost for cost in costs}
    return sorted((Line(name, best, cost_of.get(name)) for name, best in of_method.items()), key=Line.rank)


def markdown(lines: Sequence[Line], facts: Mapping[str, object]) -> str:
    """Return the table in Markdown, preceded by `facts`."""
    columns = {"Method": [line.method for line in lines]} | _columns(lines)
    text = [f"{name}: {value}  " for name, value in facts.items()]
    text += ["", f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    text += [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    return "\n".join(text) + "\n"


def _columns(lines: Sequence[Line]) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    for task in _tasks(lines):
        runs = [line.best.get(task) for line in lines]
        if any(run is not None and run.score is not None for run in runs):
            columns[f"{task}: score"] = ["" if run is None or run.score is None else f"{run.score:.0%}" for run in runs]
        columns[f"{task}: eval loss"] = ["" if run is None else f"{run.loss:.3f}" for run in runs]
        columns[f"{task}: learning rate"] = ["" if run is None else f"{run.learning_rate:.2g}" for run in runs]
    columns["Trained parameters"] = [f"{line.any_run.trainable_parameters:,}" for line in lines]
    columns["File"] = [f"{line.any_run.file_mb:.3g} MB" for line in lines]
    if any(line.cost for line in lines):
        columns["Peak memory"] = [f"{line.cost.peak_memory_gb:.2f} GB" if line.cost else "" for line in lines]
        columns["Tokens/s"] = [f"{line.cost.tokens_per_second:,.0f}" if line.cost else "" for line in lines]
    return columns


def _tasks(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(task for line in lines for task in line.best))


def draw(lines: Sequence[Line], path: Path) -> None:
    """Plot one row per method, the best at the top, in panels of scores, losses, parameters, speed and memory."""
    rows = lines[::-1]
    panels: dict[str, list[float]] = {}
    nan = float("nan")
    for task in _tasks(lines):
        runs = [line.best.get(task) for line in rows]
        scores = [nan if run is None or run.score is None else 100 * run.score for run in runs]
        if any(score == score for score in scores):
            panels[f"{task}: exact match, %"] = scores
        panels[f"{task}: eval loss"] = [nan if run is None else run.loss for run in runs]
    panels["trained parameters"] = [line.any_run.trainable_parameters for line in rows]
    if any(line.cost for line in rows):
        panels["tokens per second"] = [line.cost.tokens_per_second if line.cost else nan for line in rows]
        panels["peak memory, GB"] = [line.cost.peak_memory_gb if line.cost else nan for line in rows]
    figure = Figure(figsize=(2.6 * len(panels) + 1, 1 + 0.26 * len(rows)), dpi=120, layout="constrained")
    for axes, (label, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        axes.plot(values, range(len(rows)), "o", color="#08519c", markersize=5)
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if label == "trained parameters":
            axes.set_xscale("log")
        axes.set_yticks(range(len(rows)), [line.method for line in rows], fontsize=8)
    figure.savefig(path)


def _write_csv(path: Path, records: Sequence[Outcome] | Sequence[Cost]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(records[0])])
        writer.writeheader()
        writer.writerows(asdict(record) for record in records)
