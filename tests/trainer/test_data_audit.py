"""Audit of a run's data: files in output_dir, the limit of lost targets, and preference data."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.cli.run_finetune import run_program
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer import data_audit as audit_module
from paddlenlp_ext.utils.logging import get_logger

FRUITS = ("plum", "apple", "lime", "pear", "fig")


@pytest.fixture
def run(run_folders):
    """Return a function that runs a program on the tiny model, and returns data_audit.json."""

    def run_(sections=SECTIONS, **keys):
        values = {"model_name_or_path": "model", "output_dir": "out"}
        paths = {name: str(run_folders / path) for name, path in values.items()}
        common = {"data_cache_dir": str(run_folders / "cache"), "device": "cpu", "do_train": True, "max_steps": 1}
        data = {} if "train_dataset_path" in keys else {"dataset_name_or_path": str(run_folders / "data")}
        written = {**paths, **common, **data, **keys}
        config = load_run_config([w for k, v in written.items() for w in (f"--{k}", str(v))], peft_methods(), sections)
        run_program(config)
        return json.loads((run_folders / "out" / "data_audit.json").read_text())

    return run_


def write(folder, rows, name="train.json"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_audit_only_of_train_and_dev_names_the_rows_that_both_have(run, run_folders):
    with pytest.raises(
        ValueError, match=r"data audit: 12 errors, 0 warnings, 0 notes; .*data_audit.html lists the findings"
    ):
        run(audit_only=True, do_eval=True, evaluation_strategy="no")
    report = json.loads((run_folders / "out" / "data_audit.json").read_text())
    assert [split["split"] for split in report["splits"]] == ["train", "dev"]
    (finding,) = report["splits"][1]["findings"]
    assert finding["check"] == "dev row in train" and finding["count"] == 12
    assert "<svg" in (run_folders / "out" / "data_audit.html").read_text()
    assert not (run_folders / "cache").exists() and not (run_folders / "out" / "run_config.json").exists()


def test_audit_only_lists_invalid_rows_that_would_stop_training(run, run_folders):
    write(run_folders / "data", [{"src": "red", "tgt": "red lime"}, {"src": "red"}])
    with pytest.raises(ValueError, match="1 error"):
        run(audit_only=True, max_lost_targets=0.5)


@pytest.mark.parametrize("keys", [{}, {"lazy": True}])
def test_audit_true_audits_and_trains(run, run_folders, keys):
    report = run(audit=True, **keys)
    assert report["num_rows"] == 12 and report["errors"] == 0
    assert (run_folders / "out" / "train_results.json").is_file()


def test_audit_true_compares_the_account_with_that_of_training(run, monkeypatch):
    expected = []
    monkeypatch.setattr(audit_module, "check_account", lambda split, counts: expected.append((split, counts)))
    report = run(audit=True)
    ((split, counts),) = expected
    assert {name: getattr(split.rows.stats, name) for name in counts} == counts
    assert counts["num_read"] == 12 and counts["num_tokens"] == report["splits"][0]["account"]["num_tokens"]


@pytest.mark.parametrize(
    ("keys", "beyond"),
    [
        ({}, "4 of 6 training rows are longer than the model's context of 256 positions; lower max_length, or"),
        ({"lazy": True}, "max_length 600 exceeds the model's context of 256 positions; lower max_length, or extend"),
        ({"max_length": 200, "max_lost_targets": 1}, None),
        ({"use_long_sequence_strategies": True, "strategy_name": "linear", "rope_scaling_factor": 2}, None),
    ],
)
def test_run_with_rows_beyond_the_context_warns_in_the_run_and_the_plan(
    run, run_folders, caplog, capsys, monkeypatch, keys, beyond
):
    monkeypatch.setattr(get_logger(), "propagate", True)
    write(run_folders / "data", [{"src": "red =", "tgt": "lime " * (400 if index < 4 else 20)} for index in range(6)])
    keys = {"max_length": 600, **keys}
    report = run(audit=True, **keys)
    assert (beyond is None) == ("model's context" not in caplog.text) and (beyond or "") in caplog.text
    found = {finding["check"]: finding["count"] for finding in report["splits"][0]["findings"]}
    assert found.get("beyond the context") == (4 if beyond else None)
    run(dry_run=True, overwrite_output_dir=True, **keys)
    plan = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (beyond is None) == ("model's context" not in plan)


def test_preference_rows_beyond_the_context_count_the_prompt_with_the_longer_answer(
    run, run_folders, caplog, monkeypatch
):
    monkeypatch.setattr(get_logger(), "propagate", True)
    rows = [{"prompt": "red =", "chosen": "lime " * 200, "rejected": "fig " * words} for words in (200, 300)]
    write(run_folders, rows, "pairs.json")
    paths = {"train_dataset_path": run_folders / "pairs.json", "max_length": 1000}
    report = run(PREFERENCE_SECTIONS, audit=True, **paths)
    assert "1 of 2 training rows are longer than the model's context of 256 positions" in caplog.text
    found = {finding["check"]: finding["count"] for finding in report["splits"][0]["findings"]}
    assert found["beyond the context"] == 1


LONG = [{"src": "red =", "tgt": "lime " * 20} for _ in range(6)]


@pytest.mark.parametrize("keys", [{}, {"lazy": True}, {"dry_run": True}, {"audit_only": True}])
def test_run_that_loses_too_many_targets_stops_before_training(run, run_folders, keys):
    write(run_folders / "data", LONG)
    with pytest.raises(ValueError, match=r"max_lost_targets 0.2: \d+\.\d% of the target tokens \(\d+\) are lost"):
        run(max_length=12, src_length=6, **keys)
    assert not (run_folders / "out" / "train_results.json").exists()


def test_run_with_a_higher_limit_trains_on_what_is_left(run, run_folders):
    write(run_folders / "data", LONG)
    report = run(max_length=12, src_length=6, max_lost_targets=0.9, audit=True)
    (kind,) = {finding["check"] for finding in report["splits"][0]["findings"]} - {"duplicate", "repeated text"}
    assert kind == "target mostly cut away"


@pytest.mark.parametrize("sections", [PREFERENCE_SECTIONS, REWARD_SECTIONS])
def test_audit_only_of_pairs_checks_both_answers(run, run_folders, sections):
    rows = [{"prompt": f"red {a} =", "chosen": f"blue {a}", "rejected": f"green {a}"} for a in FRUITS]
    rows[3]["rejected"] = "green pear kiwi"
    write(run_folders, rows, "pairs.jsonl")
    with pytest.raises(ValueError, match="1 error, 1 warning"):
        run(sections, audit_only=True, train_dataset_path=run_folders / "pairs.jsonl")
