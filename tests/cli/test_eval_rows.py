"""Eval rows of a run, as `pnx predict` and `pnx eval` find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.cli.eval_rows import find_eval_rows
from paddlenlp_ext.cli.run_folder import RunFolder
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.dataset_files import open_dataset

ROWS = [{"src": f"question {number}", "tgt": "是"} for number in range(40)]


def eval_rows(folder: Path, **settings: Any) -> Path | None:
    return find_eval_rows(RunFolder(folder, folder, settings=settings))


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def read_rows(path: Path | None) -> list[dict[str, str]]:
    assert path is not None
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("key", ["dataset_name_or_path", "train_dataset_path"])
def test_find_eval_rows_with_dev_ratio_writes_the_rows_that_training_leaves_out(tmp_path, key):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "test.json", ROWS)
    trained = open_dataset(DataConfig(dataset_name_or_path=file, dev_ratio=0.25), "train")
    left_out = [row for row in ROWS if row not in [read.value for read in trained[0].rows()]]
    assert left_out
    path = eval_rows(tmp_path, **{key: file}, dev_ratio=0.25)
    assert path == tmp_path / "eval_rows.jsonl" and read_rows(path) == left_out


def test_find_eval_rows_with_dev_ratio_that_holds_out_nothing_names_the_key(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="dev_ratio 1e-09 holds out no rows"):
        eval_rows(tmp_path, dataset_name_or_path=file, dev_ratio=1e-9)


def test_find_eval_rows_of_a_folder_returns_its_dev_split(tmp_path):
    write_rows(tmp_path / "train.json", ROWS)
    write_rows(tmp_path / "dev.jsonl", ROWS[:1])
    assert eval_rows(tmp_path, dataset_name_or_path=str(tmp_path)) == tmp_path / "dev.jsonl"


def test_find_eval_rows_does_not_return_the_training_file(tmp_path):
    assert eval_rows(tmp_path, dataset_name_or_path=write_rows(tmp_path / "rows.jsonl", ROWS)) is None


def test_find_eval_rows_returns_the_only_file_of_eval_dataset_path(tmp_path):
    train, dev = (write_rows(tmp_path / f"{name}.jsonl", ROWS[:1]) for name in ("train", "math"))
    found = eval_rows(tmp_path, dataset_name_or_path=train, eval_dataset_path=[dev])
    assert found == Path(dev)
    assert eval_rows(tmp_path, dataset_name_or_path=train, eval_dataset_path={"math": dev}) == found
    assert eval_rows(tmp_path, dataset_name_or_path=train, eval_dataset_path={"math": dev, "code": train}) is None


def test_find_eval_rows_with_column_mapping_renames_the_columns(tmp_path):
    dev = write_rows(tmp_path / "dev.json", [{"question": "2 + 2?", "tgt": "4"}])
    path = eval_rows(tmp_path, eval_dataset_path=[dev], column_mapping={"question": "src"})
    assert read_rows(path) == [{"src": "2 + 2?", "tgt": "4"}]


def test_find_eval_rows_of_a_built_in_dataset_writes_its_dev_split(tmp_path):
    assert len(read_rows(eval_rows(tmp_path, dataset_name_or_path="inflection"))) > 10


@pytest.mark.parametrize("settings", [{}, {"dataset_name_or_path": "<rows>", "dev_ratio": 0.5}])
def test_find_eval_rows_without_a_dataset_on_disk_returns_none(tmp_path, settings):
    assert eval_rows(tmp_path, **settings) is None


def test_find_eval_rows_of_a_dataset_that_is_gone_names_the_argument(tmp_path):
    with pytest.raises(ValueError, match=r"the eval rows of the run cannot be read .*gone.*; pass --data ROWS\.jsonl"):
        eval_rows(tmp_path, dataset_name_or_path=str(tmp_path / "gone"))
