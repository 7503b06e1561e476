"""Read the folder of a run: history, results, generated answers, unstable steps and data audit.

history.jsonl has a line for each optimizer step, and a line with the key `event` for everything else:

    {"event": "start", "step": 0, "time": 1760000000.0, "total_steps": 45, "command": [...], ...}
    {"step": 1, "time": 1760000001.2, "loss": 3.1, "learning_rate": 0.0005, "grad_norm": 2.5, ...}
    {"step": 2, "time": 1760000002.1, "skipped": "non_finite"}
    {"event": "evaluation", "step": 2, "time": 1760000004.0, "eval_loss": 2.9, ...}
    {"event": "sampled_answers", "step": 2, "time": 1760000004.1, "answers": [{"prompt": ..., "reward": 1.0, ...}]}
    {"event": "end", "step": 2, "time": 1760000004.1, "outcome": "stopped", "reason": "stopped by SIGTERM ..."}

Runs of earlier versions have no history.jsonl; their steps are the log entries of metrics.jsonl.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.locks import check_no_active_run

HISTORY_FILE, PAGE_FILE = "history.jsonl", "report.html"
_ANSWERS_FILE, _TEST_ANSWERS_FILE = "generated_output.json", "generated_output_test.json"
_KNOWN_FILES = (HISTORY_FILE, "metrics.jsonl", "trainer_state.json", "all_results.json", "eval_results.json")
MAX_ANSWERS = 8
"""Maximum number of answers in history.jsonl and on the page."""


@dataclass(frozen=True)
class Answer:
    """Question with the reference answer, and the model's answers before and after training; None: not generated."""

    question: str
    right: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Answers:
    """Generated answers of a run, and their times, such as "step 40"; `before` is None without earlier answers."""

    rows: list[Answer]
    before: str | None
    after: str


@dataclass
class Run:
    """Contents of the folder of a run.

    Attributes:
        folder: the folder.
        steps: history.jsonl's entries of optimizer steps, in ascending order; in runs without history.jsonl, the log
            entries.
        skipped: history.jsonl's entries of skipped steps.
        evaluations: metrics of each evaluation during training in ascending order, with the key `step`.
        sampled_answers: events with sampled answers and their rewards, in runs of GRPO.
        events: all other events of the history.
        config: flat configuration in run_config.json.
        results: metrics in all_results.json.
        bad_steps: entries of bad_steps.jsonl.
        audit: contents of data_audit.json; None without an audit.
        answers: generated answers; None if there are none.
        is_active: whether a run is training in the folder.
    """

    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    sampled_answers: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    audit: dict[str, Any] | None = None
    answers: Answers | None = None
    is_active: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def start(self) -> dict[str, Any]:
        """Return the event of the last start or resume; empty for runs without history.jsonl."""
        return next((event for event in reversed(self.events) if event["event"] in ("start", "resume")), {})

    @property
    def end(self) -> dict[str, Any] | None:
        """Return the last event if it is the end of the run, else None."""
        return self.events[-1] if self.events and self.events[-1]["event"] == "end" else None

    @property
    def last_step(self) -> int:
        """Return the last step that was trained or skipped; 0 before the first step."""
        return max((entry["step"] for entry in (*self.steps[-1:], *self.skipped[-1:])), default=0)

    @property
    def total_steps(self) -> int:
        """Return the planned number of steps; the last step if the planned number is unknown."""
        return self.start.get("total_steps") or self.last_step

    @property
    def loss_names(self) -> list[str]:
        """Return the names of the evaluation losses, such as eval_loss, one for each dev set."""
        names = {name: None for entry in self.evaluations for name in entry if is_eval_loss(name)}
        return list(names)

    @property
    def train_seconds(self) -> float:
        """Return the seconds in optimizer steps, including steps before a resume."""
        if "train_runtime" in self.results:
            return self.results["train_runtime"]
        return sum(entry.get("seconds", 0.0) for entry in self.steps)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all steps."""
        return self.steps[-1].get("num_tokens", 0) if self.steps else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of each step that has the value, in GiB instead of bytes if the name ends with _gib."""
        stored = name.replace("_gib", "_bytes")
        scale = 1 if name == stored else 2**30
        return [(entry["step"], entry[stored] / scale) for entry in self.steps if _is_number(entry.get(stored))]

    def eval_series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of each evaluation that has the metric."""
        return [(entry["step"], entry[name]) for entry in self.evaluations if _is_number(entry.get(name))]

    def best(self) -> tuple[str, int, float] | None:
        """Return the name, step and value of the lowest evaluation loss of the first dev set.

        Returns:
            None if no evaluation follows step 0. An evaluation at step 0 (`eval_on_start`) measures the model before
                training.
        """
        for name in self.loss_names:
            points = self.eval_series(name)
            if points and points[-1][0] > 0:
                step, value = min(points, key=lambda point: point[1])
                return name, step, value
        return None


def is_eval_loss(name: str) -> bool:
    """Return whether a metric is the loss of a dev set: eval_loss or eval_<name>_loss."""
    return name.startswith("eval_") and name.endswith("_loss")


def read_run(folder: Path, before: Path | None = None) -> Run:
    """Read the folder of a run.

    Args:
        folder: the `output_dir` of the run.
        before: `output_dir` of an evaluation of the model before training; None: the answers before training are the
            answers of the first evaluation during training.

    Raises:
        ValueError: the folder has no run, a file in it is damaged, or `before` has no answers.
    """
    if not any((folder / name).is_file() for name in _KNOWN_FILES):
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; name the output_dir of a run")
        raise ValueError(
            f"{folder}: this is not a folder of a run, because it has no {HISTORY_FILE}; name an output_dir"
        )
    run = Run(folder, is_active=_is_active(folder))
    run.config = _read_optional(folder / "run_config.json")
    run.results = _read_optional(folder / "all_results.json")
    run.bad_steps = read_lines(folder / "bad_steps.jsonl")
    run.audit = _read_optional(folder / "data_audit.json") or None
    history = read_lines(folder / HISTORY_FILE)
    first = min((entry["step"] for entry in history if "event" not in entry), default=None)
    evaluated = {entry["step"] for entry in history if entry.get("event") == "evaluation"}
    for entry in read_lines(folder / "metrics.jsonl"):  # log entries of the steps before the history
        if first is None or entry["step"] < first:
            if "loss" in entry:
                run.steps.append(entry)
            elif entry["step"] not in evaluated:
                run.evaluations.append(entry)
    for entry in history:
        _add(run, entry)
    run.answers = _answers(run, before)
    return run


def _add(run: Run, entry: dict[str, Any]) -> None:
    if entry.get("event") == "evaluation":
        run.evaluations.append(entry)
    elif entry.get("event") == "sampled_answers":
        run.sampled_answers.append(entry)
    elif "event" in entry:
        run.events.append(entry)
    else:
        (run.skipped if "skipped" in entry else run.steps).append(entry)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON Lines file, without an incomplete last line; empty if the file is missing.

    Raises:
        ValueError: a line is not a JSON object.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    objects = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: damaged or not JSON ({error.msg}); remove the line") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object; remove the line")
        objects.append(value)
    return objects


def _is_active(folder: Path) -> bool:
    try:
        check_no_active_run(folder)
    except ValueError:
        return True
    return False


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def first_answers(folder: Path) -> list[dict[str, Any]]:
    """Return the first generated answers in a folder: dicts with the keys src, tgt and output."""
    paths = [folder / _ANSWERS_FILE, *sorted(folder.glob("generated_output_*.json"))]
    path = next((path for path in paths if path.is_file()), None)
    return [] if path is None else read_lines(path)[:MAX_ANSWERS]


def _answers(run: Run, before: Path | None) -> Answers | None:
    """Return the last answers of a run; None if the run has no answers.

    Earlier answers come from `before`, or else from the first evaluation.
    """
    earlier = [entry for entry in run.evaluations if entry.get("answers")]
    last = first_answers(run.folder)
    if not last:
        return None
    has_later = len(earlier) > 1 or (earlier and earlier[0]["step"] == 0 and "eval_loss" in run.results)
    first = first_answers(before) if before is not None else earlier[0]["answers"] if has_later else []
    if before is not None and not first:
        raise ValueError(
            f"{before}: no {_ANSWERS_FILE}; evaluate into this folder with eval_with_do_generation: true and "
            "save_generation_output: true"
        )
    known = {row["src"]: row["output"] for row in first}
    rows = [Answer(row["src"], row["tgt"], known.get(row["src"]), row["output"]) for row in last]
    at_step = f"step {earlier[0]['step']}" if first and earlier else None
    label = at_step if before is None else "before training"
    return Answers(rows, label, "after training" if "eval_loss" in run.results else f"step {run.last_step}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
