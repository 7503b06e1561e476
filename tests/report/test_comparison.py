"""Comparison of runs: results, and differences of keys, data and environment."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.report.comparison import differences, render_comparison, result_rows
from paddlenlp_ext.report.run_folder import read_run
from tests.report.conftest import Page, history, write_run


@pytest.fixture
def runs(tmp_path):
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "second", history()[:40])]
    config = {"learning_rate": 0.001, "max_grad_norm": 1.0, "output_dir": "second", "hub_token": "abc"}
    (folders[1] / "run_config.json").write_text(json.dumps(config))
    return [read_run(folder) for folder in folders]


def test_differences_lists_only_what_differs_and_hides_secrets(runs):
    found = differences(runs)
    assert [(row.name, row.values) for row in found["Keys"]] == [
        ("learning_rate", ["0.004", "0.001"]),
        ("hub_token", ["", "(hidden)"]),
    ]
    assert found["Data"] == found["Environment"] == []


def test_result_rows_mark_the_lowest_loss(runs):
    rows = {row.name: row for row in result_rows(runs)}
    assert rows["end"].values == ["Completed: 60 steps", "Killed at step 37 of 60"]
    assert rows["last training loss"].values == ["1.05", "1.081"] and rows["last training loss"].best == 0


def test_render_comparison_writes_a_closed_page_with_both_runs(runs):
    page = Page(render_comparison(runs))
    assert "script" not in page.tags and "first" in page.text and "second" in page.text
    assert page.tags.count("svg") == 6


def test_render_comparison_of_one_run_is_an_error(runs):
    with pytest.raises(ValueError, match="needs 2 to 6 runs; got 1"):
        render_comparison(runs[:1])
