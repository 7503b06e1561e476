"""Rows that a program passes as a list of dicts or as a `datasets.Dataset`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.rows.errors import DataError

ROWS = [{"src": f"Frage {index}", "tgt": f"Antwort {index}"} for index in range(1200)]


class Columns:
    """Stand-in for `datasets.Dataset`, which the tests do not need: rows by index, and the names of the columns."""

    def __init__(self, rows):
        self.column_names = sorted({name for row in rows for name in row})
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return {name: self._rows[index].get(name) for name in self.column_names}


@pytest.fixture
def load(tokenizer, tmp_path):
    def load_rows(dataset, **keys):
        return load_dataset(dataset, "train", tokenizer, data_cache_dir=str(tmp_path / "cache"), **keys)

    return load_rows


def test_load_dataset_of_rows_in_memory_is_that_of_the_file(load, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    loaded = [load(dataset) for dataset in (str(file), ROWS, Columns(ROWS))]
    for dataset in loaded[1:]:
        assert len(dataset) == len(ROWS) and dataset.source(7) == ("<rows>", 7)
        for index in (0, 600, 1199):
            np.testing.assert_array_equal(dataset[index].tokens, loaded[0][index].tokens)
            np.testing.assert_array_equal(dataset[index].loss_mask, loaded[0][index].loss_mask)
    assert [answer for _, answer, _ in loaded[1].prompts()] == [row["tgt"] for row in ROWS]


def test_load_dataset_of_rows_in_memory_reads_the_cache_of_equal_rows_only(load, tmp_path):
    load(ROWS)
    load([dict(row) for row in ROWS])
    assert len(list((tmp_path / "cache").glob("train-*/"))) == 1
    changed = [*ROWS[:-1], {**ROWS[-1], "tgt": "anders"}]
    assert load(changed)[1199].tokens.tolist() != load(ROWS)[1199].tokens.tolist()


def test_load_dataset_of_rows_with_null_columns_has_no_such_fields(load):
    dataset = load(Columns([ROWS[0], {**ROWS[1], "note": "x"}]))
    assert dataset.stats.unknown_fields == {"<rows>": {"note": 1}}


def test_load_dataset_of_invalid_rows_names_their_index(load):
    with pytest.raises(DataError, match="row 3: missing key: the row has the keys 'src'; add 'tgt'"):
        load([*ROWS[:3], {"src": "Frage"}])
    with pytest.raises(DataError, match="row 0: wrong type: src is a tuple; write a string"):
        load([{"src": ("Frage",), "tgt": "Antwort"}])
    assert len(load([*ROWS[:3], {"src": "Frage"}], bad_rows="drop")) == 3


def test_load_dataset_of_other_objects_names_what_to_pass(load):
    with pytest.raises(ValueError, match="the dataset has no rows; pass a path, a list of dicts"):
        load([])
    with pytest.raises(ValueError, match="row 0 is a str; pass a path, a list of dicts"):
        load(["train.json"])
    with pytest.raises(ValueError, match="a set is not a dataset; pass a path, a list of dicts"):
        load({"train.json"})
