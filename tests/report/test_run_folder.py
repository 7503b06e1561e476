"""Reading the folder of a run."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.report.findings import verdict
from paddlenlp_ext.report.run_folder import read_lines, read_run
from tests.report.conftest import history, write_lines, write_run


def test_read_run_sorts_the_lines_of_the_history(run_folder):
    run = read_run(run_folder)
    assert [entry["step"] for entry in run.steps] == [step for step in range(1, 61) if step != 40]
    assert [entry["step"] for entry in run.skipped] == [40]
    assert run.eval_series("eval_loss") == [(20, 1.25), (59, 1.5), (60, 1.75)]
    assert [event["event"] for event in run.events] == ["start", "resume", "end"]
    assert run.series("peak_memory_gib")[0] == (1, 1.5)


def test_read_run_of_an_earlier_version_reads_metrics(tmp_path):
    entries = [{"step": 10, "loss": 2.0}, {"step": 10, "eval_loss": 1.9}, {"step": 20, "loss": 1.0}]
    write_lines(tmp_path / "metrics.jsonl", entries)
    run = read_run(tmp_path)
    assert run.series("loss") == [(10, 2.0), (20, 1.0)] and run.best() == ("eval_loss", 10, 1.9)
    assert verdict(run).headline == "20 steps"


def test_read_run_takes_the_steps_before_the_history_from_metrics(tmp_path):
    folder = write_run(tmp_path / "lora", [line for line in history() if line["step"] > 40])
    write_lines(folder / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in (20, 40, 60)])
    assert [entry["step"] for entry in read_run(folder).steps] == [20, 40, *range(41, 61)]


def test_read_run_shows_the_answers_of_step_0_beside_the_last(run_folder):
    (question,) = read_lines(run_folder / "generated_output.json")
    start = {"event": "evaluation", "step": 0, "time": 1.0, "eval_loss": 3.0, "answers": [{**question, "output": "?"}]}
    write_lines(run_folder / "history.jsonl", [start, *read_lines(run_folder / "history.jsonl")])
    write_lines(run_folder / "metrics.jsonl", [{"step": 0, "eval_loss": 3.0}])
    run = read_run(run_folder)
    assert run.eval_series("eval_loss")[0] == (0, 3.0) and len(run.evaluations) == 4
    assert run.answers is not None and (run.answers.before, run.answers.rows[0].before) == ("step 0", "?")
    write_lines(run_folder / "history.jsonl", [start])
    assert (answers := read_run(run_folder).answers) is not None and answers.before == "step 0"


def test_read_run_with_a_folder_of_answers_before_training_shows_them(run_folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"no generated_output.json; evaluate into this folder with eval_with_do_generation"
    ):
        read_run(run_folder, tmp_path)
    (question,) = read_lines(run_folder / "generated_output.json")
    write_lines(tmp_path / "generated_output.json", [{**question, "output": "I cannot say"}])
    answers = read_run(run_folder, tmp_path).answers
    assert (answers.before, answers.rows[0].before, answers.rows[0].after) == (
        "before training",
        "I cannot say",
        "mice",
    )


def test_read_run_refuses_other_folders(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"not a folder of a run, because it has no history.jsonl; name an output_dir"):
        read_run(tmp_path)


def test_read_lines_ignores_an_incomplete_last_line_and_names_a_damaged_one(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_lines(path) == [{"step": 1}]
    for damaged in ("{step}", json.dumps([1])):
        path.write_text(f'{{"step": 1}}\n{damaged}\n')
        with pytest.raises(ValueError, match=r"history.jsonl:2: .*remove the line"):
            read_lines(path)


def test_read_run_of_an_evaluation_without_training_has_a_verdict(tmp_path):
    (tmp_path / "all_results.json").write_text('{"eval_loss": 3.4643}')
    stated = verdict(read_run(tmp_path))
    assert (stated.headline, stated.details) == ("Evaluation without training", "Dev loss 3.464 at the end.")
