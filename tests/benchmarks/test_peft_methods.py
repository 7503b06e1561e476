"""Comparison of adapter methods: planned runs, choice of the best run, and a small comparison from the command line."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from benchmarks.peft_methods.entries import LORA_RANKS, all_entries
from benchmarks.peft_methods.outcome import Cost, Outcome, best_of_each
from benchmarks.peft_methods.run import main
from benchmarks.peft_methods.table import markdown, table_lines, write_outcomes
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.peft.registry import peft_methods

LORA = Outcome(
    task="inflection",
    method="lora",
    learning_rate=1e-3,
    score=0.5,
    loss=1.0,
    train_loss=1.1,
    trainable_parameters=1000,
    num_tokens=4096,
    file_mb=0.5,
)
LORA_COST = Cost(method="lora", tokens_per_second=2000.0, peak_memory_gb=1.5)


def test_all_entries_cover_full_fine_tuning_every_method_and_all_lora_ranks(tmp_path: Path):
    entries = all_entries(peft_methods())
    assert len({entry.name for entry in entries}) == len(entries)
    assert (entries[0].name, entries[0].keys) == ("full", {})
    for switch in peft_methods():
        assert any(entry.keys.get(switch) is True for entry in entries), switch
    assert [entry.keys["lora_rank"] for entry in entries if entry.name.startswith("lora_r")] == list(LORA_RANKS)
    for entry in entries:
        arguments = [word for key, value in entry.keys.items() for word in (f"--{key}", str(value))]
        shared = ["--model_name_or_path", "m", "--dataset_name_or_path", "d", "--output_dir", str(tmp_path)]
        config = load_run_config([*shared, "--do_train", "true", *arguments], peft_methods())
        assert (config.peft is None) == (entry.name == "full")


def test_all_entries_method_without_shipped_config_uses_its_defaults(tmp_path: Path):
    entries = {entry.name: entry for entry in all_entries(peft_methods(), shipped=tmp_path)}
    assert entries["sora"].keys == {"sora": True}


def test_best_of_each_returns_the_run_with_the_lowest_eval_loss():
    worse, broken = dataclasses.replace(LORA, loss=1.2, learning_rate=1.0), dataclasses.replace(LORA, loss=float("nan"))
    other = dataclasses.replace(LORA, method="sora", score=None, loss=0.9)
    assert best_of_each([broken, worse, LORA, other]) == [LORA, other]
    assert best_of_each([LORA, broken]) == [LORA]
    with pytest.raises(ValueError, match=r"different token counts \(1, 4,096\); train all"):
        best_of_each([LORA, dataclasses.replace(LORA, num_tokens=1)])


def test_write_outcomes_writes_every_figure_and_a_plot(tmp_path: Path):
    better = dataclasses.replace(LORA, method="sora", score=0.75)
    on_gsm8k = dataclasses.replace(LORA, task="gsm8k", score=None, loss=0.8, learning_rate=3e-3, num_tokens=9)
    lines = table_lines([LORA, better, on_gsm8k], [LORA_COST])
    text = markdown(lines, {"model": "m"})
    assert "model: m" in text
    sora, lora = text.splitlines()[-2:]
    assert sora == "| sora | 75% | 1.000 | 0.001 |  |  | 1,000 | 0.5 MB |  |  |"
    assert lora == "| lora | 50% | 1.000 | 0.001 | 0.800 | 0.003 | 1,000 | 0.5 MB | 1.50 GB | 2,000 |"
    assert write_outcomes(tmp_path, [LORA, better, on_gsm8k], [LORA_COST], {}).endswith(f"{sora}\n{lora}\n")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["lora", "sora", "lora"]


@pytest.mark.layouts
def test_peft_methods_quick_run_writes_the_table_and_reuses_finished_runs(tmp_path: Path):
    options = ["--quick", "--jobs", "2", "--out", str(tmp_path), "--methods"]
    main([*options, "full", "lora_r2", "--no_costs"])
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == 2 * ["full", "lora_r2"]
    assert [row["task"] for row in rows] == 2 * ["inflection"] + 2 * ["gsm8k"]
    assert len({row["num_tokens"] for row in rows}) == 1
    assert int(rows[0]["trainable_parameters"]) > int(rows[1]["trainable_parameters"]) > 0
    assert [bool(row["score"]) for row in rows] == 2 * [True] + 2 * [False]

    logs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/*/run.log")}
    assert len(logs) == 4
    main([*options, "lora_r2"])
    assert {path: path.stat().st_mtime_ns for path in logs} == logs
    with (tmp_path / "costs.csv").open(encoding="utf-8") as file:
        (cost,) = csv.DictReader(file)
    assert float(cost["tokens_per_second"]) > 0 and float(cost["peak_memory_gb"]) > 0
    assert (tmp_path / "table.png").is_file() and "| lora_r2 |" in (tmp_path / "table.md").read_text()

    with pytest.raises(ValueError, match="--methods lora_r3: unknown"):
        main([*options, "lora_r3"])
