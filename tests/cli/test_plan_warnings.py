"""Warnings about settings that do not fit the number of steps or the memory."""

from __future__ import annotations

import re

import pytest

from paddlenlp_ext.cli.plan_warnings import memory_warning, plan_warnings
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.utils import free_memory as module
from paddlenlp_ext.utils.free_memory import free_memory


def run(optim: OptimConfig | None = None, logging_steps: int = 1, **train) -> RunConfig:
    return RunConfig(optim=optim or OptimConfig(), train=TrainConfig(logging_steps=logging_steps, **train))


def test_plan_warnings_of_a_usual_run_are_empty():
    assert plan_warnings(run(logging_steps=10), 10) == []
    assert plan_warnings(run(OptimConfig(warmup_steps=10), 10), 1000) == []


@pytest.mark.parametrize(
    ("config", "steps", "warning"),
    [
        (run(), 9, "only 9 optimizer steps"),
        (
            run(OptimConfig(warmup_ratio=0.1)),
            10,
            "rate of 0, so the first of 10 optimizer steps cannot",
        ),
        (
            run(logging_steps=500),
            20,
            "logging_steps is 500, so a run of 20 optimizer steps logs its loss only at the end",
        ),
        (run(evaluation_strategy="steps", eval_steps=21), 20, "eval_steps is 21, so a run of 20 .* is never evaluated"),
        (run(save_strategy="steps", save_steps=21), 20, "save_steps is 21, so a run of 20 .* saves no checkpoint"),
    ],
)
def test_plan_warnings_name_the_setting(config, steps, warning):
    (found,) = plan_warnings(config, steps)
    assert re.search(warning, found)


def test_memory_warning_only_above_the_free_memory():
    assert memory_warning(10, 10) is None and memory_warning(10, None) is None
    assert "recompute: true" in str(memory_warning(11, 10))


def test_free_memory_is_at_most_what_the_container_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert free_memory() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  4 kB\n")
    assert free_memory() == 4096
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == 4096
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_memory() == 2000
