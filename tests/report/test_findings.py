"""Findings about a run in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.report.findings import duration, find_all
from paddlenlp_ext.report.run_folder import Run, read_run
from tests.report.conftest import START, step_line


def test_find_all_lists_the_findings_of_a_run_with_errors_first(run_folder):
    found = [(finding.severity, finding.text) for finding in find_all(read_run(run_folder))]
    assert found == [
        ("error", "loss or gradient norm is not finite in 1 step: step 40; the rows are listed below"),
        ("error", "6 dev rows are also in train, first at dev.json:18 (data audit)"),
        ("warning", "1 loss spike: step 50; the rows are listed below"),
        ("warning", "1 step skipped (loss not finite): step 40"),
        ("warning", "dev loss rises after step 20: 1.25 at step 20, 1.75 at step 60; the model may overfit "
         "(load_best_model_at_end keeps the best weights)"),
        ("warning", "30 of 210 rows (14.3%) were truncated to max_length"),
        ("note", "the learning rate was 0 in step 1, the first step of the warm-up"),
        ("note", "gradients were clipped to max_grad_norm 1 in 59 of 59 steps"),
        ("note", "10 of 210 rows (4.8%) were dropped"),
        ("note", "resumed 1 time, after step 30"),
    ]  # fmt: skip


def texts(losses=(), start=(), config=()):
    run = Run(Path("lora"))
    run.events = [{"step": 0, "event": "start", **START, "data": {}, **dict(start)}]
    run.config = {"evaluation_strategy": "steps", **dict(config)}
    run.steps = [step_line(step, loss) for step, loss in enumerate(losses, start=1)]
    return " | ".join(finding.text for finding in find_all(run))


def test_find_all_of_a_run_shorter_than_its_warmup_says_so():
    assert "has 3 steps and a warm-up of 5" in texts([3, 2, 1], {"total_steps": 3})
    assert "warm-up of" not in texts([3, 2, 1], {"total_steps": 6})


def test_find_all_tells_whether_the_loss_fell():
    assert "did not fall: 2 in the first steps, 2.5 in the last" in texts([2] * 10 + [2.5] * 10)
    assert "still falling at the end" in texts([5 - step / 10 for step in range(40)])
    flat = texts([5, 4, 3, 2] + [1] * 40)
    assert "falling" not in flat and "fall" not in flat


def test_find_all_without_evaluation_says_so():
    assert "no evaluation" in texts([2, 1], config={"evaluation_strategy": "no"})
    assert "no evaluation" not in texts([2, 1])


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.24, "4.2 s"), (59.97, "60.0 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")]
)
def test_duration_chooses_the_unit(seconds, text):
    assert duration(seconds) == text
