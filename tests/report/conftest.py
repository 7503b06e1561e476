"""Folder of a small run: 60 steps with a spike, a skipped step, a resume, an overfitting dev loss and answers."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

START = {
    "kind": "sft", "total_steps": 60, "warmup_steps": 5, "command": ["python", "run.py", "--hub_token", "(hidden)"],
    "changed_keys": {"learning_rate": [0.004, 5e-5]}, "environment": {"paddlepaddle": "3.3.1"},
    "data": {"num_rows": 200, "num_read": 210, "num_truncated": 30, "num_dropped": 10, "num_tokens": 9000,
             "num_target_tokens": 900, "bin_width": 2, "bins": [3, 9], "median_length": 45, "longest": 57},
}  # fmt: skip
ATTACK = "<script>alert('x')</script>"


def step_line(step, loss=None):
    return {
        "step": step, "time": 1000.0 + step, "epoch": step / 60, "loss": 1 + 3 / step if loss is None else loss,
        "learning_rate": 0.001 * min(step - 1, 5), "grad_norm": 1.01 + step % 3, "num_tokens": 150 * step,
        "tokens_per_second": 300.0, "seconds": 0.5, "peak_memory_bytes": 3 * 2**29,
    }  # fmt: skip


def history():
    lines = [{"step": 0, "time": 1000.0, "event": "start", **START}]
    for step in range(1, 61):
        if step == 31:
            lines.append({"step": 30, "time": 1030.0, "event": "resume", **START})
        if step == 40:
            lines.append({"step": 40, "time": 1040.0, "skipped": "non_finite"})
            continue
        lines.append(step_line(step, 9.0 if step == 50 else None))
        if step % 20 == 0 or step == 59:
            answers = [{"src": ATTACK, "tgt": "mice", "output": "mouses" if step == 20 else "mice"}]
            loss = {20: 1.25, 59: 1.5, 60: 1.75}[step]
            event = {"step": step, "time": 1000.0 + step, "event": "evaluation", "eval_loss": loss, "answers": answers}
            lines.append(event)
    return [*lines, {"step": 60, "time": 1061.0, "event": "end", "outcome": "completed"}]


def write_run(folder, lines=None):
    """Write the files of a run, and return the folder."""
    folder.mkdir()
    bad = {"step": 40, "epoch": 0, "reason": "non_finite", "action": "skip", "loss": "nan", "grad_norm": 1.0,
           "rows": [f"{ATTACK}.json:{line}" for line in range(10)]}  # fmt: skip
    leak = {"check": "dev row in train", "severity": "error", "count": 6, "places": [{"place": "dev.json:18"}]}
    answer = {"src": ATTACK, "tgt": "mice", "output": "mice"}
    audit = {"errors": 6, "warnings": 0, "notes": 0, "splits": [{"split": "dev", "findings": [leak]}]}
    write_lines(folder / "history.jsonl", history() if lines is None else lines)
    write_lines(folder / "bad_steps.jsonl", [bad, {**bad, "step": 50, "reason": "loss_spike"}])
    write_lines(folder / "generated_output.json", [answer])
    (folder / "run_config.json").write_text(json.dumps({"learning_rate": 0.004, "max_grad_norm": 1.0}))
    (folder / "all_results.json").write_text(json.dumps({"eval_loss": 1.75, "train_runtime": 30.0}))
    (folder / "data_audit.json").write_text(json.dumps(audit))
    return folder


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "lora")


class Page(HTMLParser):
    """Elements and text of a page; fails if an element is not closed."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.text += data if not self.open or self.open[-1] != "style" else ""
