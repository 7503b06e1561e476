"""Compare several runs: differences in keys, data, environment and results, as a page and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.report.findings import duration, outcome
from paddlenlp_ext.report.line_chart import Chart, Line, format_value, smoothed_line
from paddlenlp_ext.report.run_folder import Run
from paddlenlp_ext.report.run_page import as_text, step_values
from paddlenlp_ext.report.templates import fill_page
from paddlenlp_ext.utils.secrets import without_secrets

MAX_RUNS = 6
_UNIMPORTANT_KEYS = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")


@dataclass(frozen=True)
class Row:
    """Row of a table: a name, the value of each run as text, and the index of the best run (None: unknown)."""

    name: str
    values: list[str]
    best: int | None = None


def result_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the results of the runs: end, steps, losses, cost and metrics."""
    best = [run.best() for run in runs]
    rows = [
        Row("end", [outcome(run)[1] for run in runs]),
        _lowest("best dev loss", [None if each is None else each[2] for each in best]),
        Row("at step", ["" if each is None else f"{each[1]:,}" for each in best]),
        _lowest("last training loss", [_last(run, "loss") for run in runs]),
        Row("time in steps", [duration(run.train_seconds) if run.steps else "" for run in runs]),
        Row("tokens", [f"{run.num_tokens:,}" if run.num_tokens else "" for run in runs]),
        Row(
            "tokens/s",
            [f"{run.num_tokens / max(run.train_seconds, 1e-9):,.0f}" if run.num_tokens else "" for run in runs],
        ),
        Row("peak memory", [_gibibytes(run) for run in runs]),
    ]
    names = {name: None for run in runs for name in run.results if name.startswith(("eval_", "test_"))}
    hidden = ("_runtime", "_second", "_num_rows", "_num_target_tokens")
    for name in names:
        if not name.endswith(hidden):
            rows.append(Row(name, [_number(run.results.get(name)) for run in runs]))
    return [row for row in rows if any(row.values)]


def differences(runs: Sequence[Run]) -> dict[str, list[Row]]:
    """Return the rows that differ between the runs under the headings "Keys", "Data" and "Environment"."""
    readers: dict[str, Callable[[Run], dict[str, Any]]] = {
        "Keys": lambda run: without_secrets(run.config),
        "Data": lambda run: {name: value for name, value in (run.start.get("data") or {}).items() if name != "bins"},
        "Environment": lambda run: run.start.get("environment", {}),
    }
    found = {}
    for heading, read in readers.items():
        values = [read(run) for run in runs]
        names = {name: None for each in values for name in each if name not in _UNIMPORTANT_KEYS}
        texts = [(name, [as_text(each[name]) if name in each else "" for each in values]) for name in names]
        found[heading] = [Row(name, row) for name, row in texts if len(set(row)) > 1]
    return found


def render_comparison(runs: Sequence[Run]) -> str:
    """Return the HTML page that compares runs.

    Raises:
        ValueError: there are fewer than two or more than six runs.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"a comparison needs 2 to {MAX_RUNS} runs; got {len(runs)}")
    names = run_names(runs)
    return fill_page(
        "comparison.html",
        f"Comparison of {len(runs)} runs",
        names=names,
        folders=[str(run.folder) for run in runs],
        results=result_rows(runs),
        differences=differences(runs),
        charts=[chart for chart in _charts(runs, names) if chart],
    )


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the folders, or the paths if two names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[Any]:
    numbered = list(enumerate(zip(runs, names, strict=True), start=1))
    train, dev = [], []
    for number, (run, name) in numbered:
        raw = run.series("loss")
        smooth = smoothed_line(raw, name, f"run{number}")
        train += [Line(name, raw, f"raw run{number}", shown=False)] if smooth.name != name else []
        train.append(smooth)
        dev += [Line(name, run.eval_series(loss), f"dots run{number}") for loss in run.loss_names[:1]]
    charts = [Chart("Training loss", train), Chart("Dev loss", dev)]
    for title, unit, key, from_zero in step_values():
        lines = [Line(name, [*run.series(key)], f"run{number}") for number, (run, name) in numbered]
        charts.append(Chart(title, lines, unit=unit, from_zero=from_zero))
    return [chart.render() for chart in charts]


def _last(run: Run, name: str) -> float | None:
    points = run.series(name)
    return points[-1][1] if points else None


def _lowest(name: str, values: Sequence[float | None]) -> Row:
    known = [value for value in values if value is not None]
    best = None if len(known) < 2 else list(values).index(min(known))
    return Row(name, [_number(value) for value in values], best)


def _number(value: float | None) -> str:
    return "" if value is None else format_value(value)


def _gibibytes(run: Run) -> str:
    peaks = [gib for _, gib in run.series("peak_memory_gib")]
    return f"{max(peaks):.2f} GiB" if peaks else ""
