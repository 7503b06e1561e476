"""Time of the first steps of a run."""

from __future__ import annotations

import re

from paddlenlp_ext.cli.time_steps import describe_seconds
from paddlenlp_ext.commands import pnx
from tests.common.hub import FakeHub


def test_plan_with_time_runs_two_steps_and_writes_and_uploads_nothing(
    hub: FakeHub, run_folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    data, model = run_folders / "data" / "train.json", run_folders / "model"
    keys = [
        "--lora",
        "--max_steps",
        "7",
        "--save_strategy",
        "steps",
        "--save_steps",
        "1",
        "--device",
        "cpu",
        "--push_to_hub",
    ]
    pnx.run(["plan", str(data), "-m", str(model), "-o", "out", *keys, "--time"])
    printed = capsys.readouterr().out
    assert "What would run" in printed and re.search(r"A step takes \d+\.\d\d s\. 7 steps take about \d+ s", printed)
    assert not (tmp_path / "out").exists() and not hub.repositories


def test_describe_seconds_chooses_the_unit():
    assert [describe_seconds(seconds) for seconds in (1, 119, 120, 7200)] == ["1 s", "119 s", "2 min", "2 h"]
