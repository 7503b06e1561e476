"""Reports of bench.py: the raw lines, a table of medians and ratios, and a plot of the ratios."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HEADINGS = (
    "",
    "program",
    "tokens/s",
    "spread",
    "peak memory",
    "our speed / peer's speed",
    "our memory / peer's memory",
)


def summarize(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one entry per program, this project's first: medians over rounds, and ratios to this project.

    `spread` is the largest minus the smallest rate, relative to the median. `speed` and `memory` are this project's
    figure divided by the program's; None for this project itself.
    """
    entries: list[dict[str, Any]] = []
    for label, lines in runs.items():
        rates = [line["tokens_per_second"] for line in lines]
        rate, memory = statistics.median(rates), statistics.median(line["peak_memory_gb"] for line in lines)
        first = entries[0] if entries else None
        entries.append({
            "label": label,
            "rate": rate,
            "spread": (max(rates) - min(rates)) / rate,
            "peak": memory,
            "speed": first and first["rate"] / rate,
            "memory": first and first["peak"] / memory,
        })  # fmt: skip
    return entries


def markdown(results: dict[str, Any]) -> str:
    """Return the table, followed by the origin of the figures."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for case in results["cases"].values():
        for entry in summarize(case["runs"]):
            ratios = [f"{entry[key]:.2f}" if entry[key] else "" for key in ("speed", "memory")]
            figures = [f"{entry['rate']:,.0f}", f"{entry['spread']:.0%}", f"{entry['peak']:.2f} GB", *ratios]
            lines.append(f"| {case['title']} | {entry['label']} | {' | '.join(figures)} |")
    lines += [
        f"\nNot measured: {title}: {' '.join(reason.split())}" for title, reason in results["not_measured"].items()
    ]
    versions = {}
    for case in results["cases"].values():
        for label, runs in case["runs"].items():
            for package in ("torch", "transformers", "peft", "paddlenlp", "paddlepaddle"):
                if package in runs[0]:
                    versions.setdefault(f"{package} {runs[0][package]}", label)
    facts = [f"{key} {value}" for key, value in results["environment"].items() if key != "paddlepaddle"]
    rounds = f"medians of {results['rounds']} rounds; in each round, all programs ran in turn"
    facts += [f"{version} ({label})" for version, label in versions.items()]
    lines.append(f"\n{rounds}; {'; '.join(facts)}.")
    return "\n".join(lines) + "\n"


def draw_ratios(results: dict[str, Any], file: Path) -> None:
    """Plot two panels of bars, one bar per peer and case: ratio of speed and ratio of memory."""
    bars = [
        (f"{case['title']}\nagainst {entry['label']}", entry["speed"], entry["memory"])
        for case in results["cases"].values()
        for entry in summarize(case["runs"])[1:]
    ]
    if not bars:
        return
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(bars)), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names, speeds, memories = zip(*reversed(bars), strict=True)
    _draw_panel(speed, names, speeds, "speed relative to the peer")
    _draw_panel(memory, names, memories, "peak memory relative to the peer")
    figure.savefig(file, dpi=130)


def _draw_panel(axes: Axes, names: tuple[str, ...], values: tuple[float, ...], title: str) -> None:
    axes.axvline(1, color="black", linewidth=0.8)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(axes.barh(names, values, color="tab:blue"), fmt="%.2f", padding=3, bbox=paper)
    axes.margins(y=0.01)
    axes.set_title(title)
    axes.set_xlim(0, 1.15 * max(1.0, *values))
    axes.tick_params(axis="y", labelsize=8)


def write_report(folder: Path, results: dict[str, Any]) -> None:
    """Write bench.json, bench.md and bench.png to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(
        f"# Speed and memory compared with other programs\n\n{markdown(results)}", encoding="utf-8"
    )
    draw_ratios(results, folder / "bench.png")
