"""Write the report of an evaluation: tables on the terminal, report.md, results.json, and all answers in rows.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paddlenlp_ext.evaluation.row_scores import Scores
from paddlenlp_ext.evaluation.statistics import Comparison, Interval
from paddlenlp_ext.evaluation.task import Measured, Task
from paddlenlp_ext.evaluation.task_options import GENERATION
from paddlenlp_ext.utils.files import write_json, write_text

_LONGEST_CELL = 400


@dataclass(frozen=True)
class Line:
    """Results of all models for one metric of one task: a line of the score table.

    Attributes:
        task: name of the task.
        metric: name of the metric.
        num_rows: number of rows, or number of windows if the task is a single text.
        scores: model -> scores.
        intervals: model -> confidence interval; None for a corpus metric.
        comparisons: model -> comparison with the first model, for every model except the first; None if the scores
            cannot be compared (see `Scores.compare`).
    """

    task: str
    metric: str
    num_rows: int
    scores: Mapping[str, Scores]
    intervals: Mapping[str, Interval | None]
    comparisons: Mapping[str, Comparison | None]

    def cell(self, model: str) -> str:
        """Return the score and the confidence interval of a model as text."""
        scores, interval = self.scores[model], self.intervals[model]
        value = scores.format(scores.value)
        return value if interval is None else f"{value} ({_range(scores, interval)})"


@dataclass(frozen=True)
class Evaluation:
    """Results of several models on several tasks.

    Attributes:
        tasks: the tasks.
        models: names of the models. All models are compared with the first model.
        measured: model -> result of each task.
        seed: random seed of the bootstrap.
        details: further entries of results.json.
    """

    tasks: Sequence[Task]
    models: Sequence[str]
    measured: Mapping[str, Sequence[Measured]]
    seed: int
    details: Mapping[str, Any]

    def lines(self) -> list[Line]:
        """Return the lines of the score table, one line for each metric of each task."""
        return [
            self._line(number, metric) for number, task in enumerate(self.tasks) for metric in task.options.metric_names
        ]

    def _line(self, number: int, metric: str) -> Line:
        scores = {model: self.measured[model][number].scores[metric] for model in self.models}
        first, *others = self.models
        return Line(
            self.tasks[number].options.title,
            metric,
            len(self.tasks[number].prompts) or len(scores[first].values),
            scores,
            {model: each.interval(self.seed) for model, each in scores.items()},
            {model: scores[model].compare(scores[first], self.seed) for model in others},
        )

    def examples(self, num_examples: int) -> tuple[str, list[list[str]]]:
        """Return the name of a task and its first rows, each with question, reference answer and all models' answers.

        The task is the first generation task, else the first multiple-choice task. If all tasks have another type, the
        name and the list are empty.
        """
        with_outputs = [
            number for number in range(len(self.tasks)) if self.measured[self.models[0]][number].outputs is not None
        ]
        if not with_outputs:
            return "", []
        generated = [number for number in with_outputs if self.tasks[number].options.task == GENERATION]
        number = (generated or with_outputs)[0]
        task = self.tasks[number]
        outputs = [self.measured[model][number].outputs or () for model in self.models]
        rows = zip(task.prompts, task.references, *outputs, strict=True)
        return task.options.title, [list(row) for row in rows][:num_examples]


def write_report(evaluation: Evaluation, folder: Path, num_examples: int) -> list[Line]:
    """Write results.json, report.md and rows.jsonl to a folder, and return the lines of the score table."""
    lines = evaluation.lines()
    write_json(folder / "results.json", {**evaluation.details, "seed": evaluation.seed, "results": _as_json(lines)})
    write_text(folder / "report.md", markdown(evaluation, lines, num_examples))
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(evaluation))
    write_text(folder / "rows.jsonl", "".join(rows))
    return lines


def _as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [
        {
            "task": line.task,
            "metric": line.metric,
            "num_rows": line.num_rows,
            "models": {
                model: {
                    "value": scores.value,
                    "interval": None if (interval := line.intervals[model]) is None else asdict(interval),
                    "difference": None if (compared := line.comparisons.get(model)) is None else asdict(compared),
                }
                for model, scores in line.scores.items()
            },
        }
        for line in lines
    ]


def _rows(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield the rows of rows.jsonl, each with question, reference answer, and the answer and scores of each model."""
    for number, task in enumerate(evaluation.tasks):
        for index, (prompt, reference) in enumerate(zip(task.prompts, task.references, strict=True)):
            models = {}
            for model in evaluation.models:
                measured = evaluation.measured[model][number]
                values = {name: each.values for name, each in measured.scores.items()}
                per_row = {name: array[index] for name, array in values.items() if len(array) == len(task.prompts)}
                models[model] = {"output": (measured.outputs or ())[index], "scores": per_row}
            yield {"task": task.options.title, "row": index, "src": prompt, "tgt": reference, "models": models}


def score_table(models: Sequence[str], lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the score table."""
    rows = [[line.task, line.metric, f"{line.num_rows:,}", *(line.cell(model) for model in models)] for line in lines]
    return ["task", "metric", "rows", *models], rows


def difference_table(models: Sequence[str], lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of differences from the first model."""
    rows = []
    for line in lines:
        for model, comparison in line.comparisons.items():
            scores = line.scores[model]
            if comparison is not None:
                difference = scores.format(comparison.difference, signed=True)
                interval = _range(scores, comparison.interval, signed=True)
                rows.append([line.task, line.metric, model, difference, interval, f"{comparison.p_value:.3f}"])
    return ["task", "metric", f"model - {models[0]}", "difference", "95 % interval", "p"], rows


def print_tables(evaluation: Evaluation, lines: Sequence[Line]) -> None:
    """Print the tables of scores and differences to the terminal."""
    console = Console(highlight=False, markup=False)  # names of models and tasks may contain brackets
    for title, (header, rows) in (
        ("Scores, with 95 % confidence intervals", score_table(evaluation.models, lines)),
        (f"Differences from {evaluation.models[0]}, on the same rows", difference_table(evaluation.models, lines)),
    ):
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        for name in header:
            table.add_column(name)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def markdown(evaluation: Evaluation, lines: Sequence[Line], num_examples: int) -> str:
    """Return the report in Markdown: scores, differences, and examples side by side."""
    parts = ["# Evaluation", "", "Scores with 95 % confidence intervals.", ""]
    parts += _markdown_table(*score_table(evaluation.models, lines))
    header, rows = difference_table(evaluation.models, lines)
    if rows:
        parts += ["", f"Differences from {evaluation.models[0]} on the same rows, with 95 % intervals. p comes from"]
        parts += ["McNemar's exact test for shares of rows, and from the paired bootstrap for other metrics.", ""]
        parts += _markdown_table(header, rows)
    task, examples = evaluation.examples(num_examples)
    if examples:
        parts += ["", f"First rows of {task}.", ""]
        parts += _markdown_table(["question", "right answer", *evaluation.models], examples)
    return "\n".join([*parts, ""])


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_cell(text) for text in row] for row in [header, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def _cell(text: str) -> str:
    text = text.strip()
    text = text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} ..."
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _range(scores: Scores, interval: Interval, signed: bool = False) -> str:
    low, high = (scores.format(bound, signed) for bound in (interval.low, interval.high))
    return f"{low.partition(' ')[0]} to {high.partition(' ')[0]}"
