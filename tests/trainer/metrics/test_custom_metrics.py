"""Metrics of the user's own: import by a dotted path, checks of the result, and a complete run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import paddlenlp_ext
from paddlenlp_ext.trainer.metrics.custom_metrics import custom_metrics, load_compute_metrics
from tests.common.adapters import run_keys

MODULE = """
SIZE = 3

def words(rows):
    assert set(rows[0]) == {"src", "tgt", "output"}
    return {"rows": len(rows), "words": sum(len(row["tgt"].split()) for row in rows) / len(rows)}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch):
    """Write a module into the current folder and return its name."""
    (tmp_path / "metrics_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "metrics_of_test"
    sys.modules.pop("metrics_of_test", None)


def test_load_compute_metrics_imports_a_function_from_the_current_folder(module):
    function = load_compute_metrics(f"{module}.words")
    assert function is not None
    assert custom_metrics(function, [{"src": "a", "tgt": "b c", "output": "d"}]) == {"rows": 1.0, "words": 2.0}
    assert load_compute_metrics(None) is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("words", "'words' is not a dotted path; write module.name, or file.py:name"),
        ("absent_module.words", r"absent_module cannot be imported \(ModuleNotFoundError.*put the module in"),
        ("broken.words", r"broken cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("metrics_of_test.other", r"other does not exist in .*metrics_of_test\.py"),
        ("metrics_of_test.SIZE", "metrics_of_test.SIZE is not a function"),
    ],
)
def test_load_compute_metrics_that_cannot_be_imported_is_an_error(module, path, words):
    Path("broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=words):
        load_compute_metrics(path)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "compute_metrics returned None; return a dict"),
        (0.5, "a value of type float; return a dict"),
        ({"a": "high"}, "a value of type str for 'a'; return a number"),
        ({"a": True}, "a value of type bool for 'a'"),
        ({1: 0.5}, "the name 1; use strings"),
        ({"a b": 0.5}, "the name 'a b'; use strings"),
        ({"loss": 0.5}, "'loss', which is the name of another metric"),
        ({"runtime": 0.5}, "'runtime', which is the name of another metric"),
    ],
)
def test_custom_metrics_of_the_wrong_kind_are_an_error(result, words):
    with pytest.raises(ValueError, match=words):
        custom_metrics(lambda rows: result, [])


def test_custom_metrics_accept_numbers_of_numpy_and_nan():
    result = custom_metrics(lambda rows: {"a": np.float32(0.5), "b": np.int64(2), "c": math.nan}, [])
    assert (result["a"], result["b"]) == (0.5, 2.0) and math.isnan(result["c"])


def test_finetune_with_several_dev_sets_and_custom_metrics_reports_each(run_folders: Path, module):
    """Check a run from files: the dev set of the folder, and a file with its first two rows only."""
    rows = (run_folders / "data" / "dev.json").read_text().splitlines()
    (run_folders / "few.jsonl").write_text("\n".join(rows[:2]))
    keys = run_keys(
        run_folders,
        max_steps=1,
        lora=True,
        do_eval=True,
        evaluation_strategy="steps",
        eval_steps=1,
        eval_dataset_path={"all": str(run_folders / "data"), "few": str(run_folders / "few.jsonl")},
        eval_with_do_generation=True,
        save_generation_output=True,
        max_new_tokens=2,
        compute_metrics=f"{module}.words",
        metric_for_best_model="few_words",
    )
    result = paddlenlp_ext.finetune(keys)
    evaluation = json.loads((run_folders / "out" / "eval_results.json").read_text())
    assert (evaluation["eval_all_rows"], evaluation["eval_few_rows"]) == (len(rows), 2)
    assert evaluation["eval_all_num_rows"] == len(rows) and evaluation["eval_few_num_rows"] == 2
    assert evaluation["eval_all_loss"] != evaluation["eval_few_loss"] and "eval_loss" not in evaluation
    assert result.trainer.state.best_name == "few_words"
    assert result.trainer.state.best_metric == evaluation["eval_few_words"] > 0
    for name, number in (("all", len(rows)), ("few", 2)):
        written = (run_folders / "out" / f"generated_output_{name}.json").read_text().splitlines()
        assert [json.loads(line)["src"] for line in written] == [json.loads(row)["src"] for row in rows[:number]]
