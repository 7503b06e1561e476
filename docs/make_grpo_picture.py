"""Write images/grpo.png and images/grpo.json: the rewards of the run of tutorials/grpo.md.

    python docs/make_grpo_picture.py checkpoints/sums

The argument is the output_dir of the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

_PICTURE = Path(__file__).parent / "images" / "grpo.png"
KEPT = ("step", "reward", "eval_reward", "entropy", "completions/mean_length", "sampling/sampling_logp_difference/max")


def draw(entries: Sequence[Mapping[str, float]], target: Path) -> None:
    """Plot the rewards of the training prompts and of the held-out prompts over the steps."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, label, style in (("reward", "training prompts", "-"), ("eval_reward", "held-out prompts", "o-")):
        points = [(entry["step"], 100 * entry[name]) for entry in entries if name in entry]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, alpha=0.4 if name == "reward" else 1.0)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("correct answers, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=130)


def main(run: Path) -> None:
    """Draw the metrics of a run, and store those that are drawn."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [{name: entry[name] for name in KEPT if name in entry} for entry in map(json.loads, lines)]
    draw(entries, _PICTURE)
    _PICTURE.with_suffix(".json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
