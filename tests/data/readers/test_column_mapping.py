"""Rows whose columns `column_mapping` renames."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.training_rows import load_rows

MAPPING = {"question": "src", "answer": "tgt"}
ROWS = [{"src": f"Frage {index}", "tgt": f"Antwort {index}"} for index in range(20)]
RENAMED = [{"question": row["src"], "answer": row["tgt"]} for row in ROWS]


@pytest.fixture
def folder(tmp_path):
    for name, rows in (("plain", ROWS), ("renamed", RENAMED)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_load_dataset_with_a_column_mapping_is_that_of_the_renamed_rows(folder, options, tokenizer):
    expected = load_dataset(options(folder / "plain.jsonl"), "train", tokenizer)
    config = options(folder / "renamed.jsonl", column_mapping=MAPPING)
    mixed = options(config.dataset_name_or_path, column_mapping=MAPPING, train_dataset_prob="1")
    found = [load_rows(each, "train", tokenizer) for each in (config, mixed)]
    found.append(load_rows(config, "train", tokenizer, rows=RENAMED))
    for dataset in found:
        assert [row.tokens.tolist() for row in dataset.head(99)] == [row.tokens.tolist() for row in expected.head(99)]
    assert list(found[0].prompts()) == list(expected.prompts())


def test_load_rows_of_a_stream_with_a_column_mapping_is_that_of_the_renamed_rows(folder, options, tokenizer):
    keys = {"lazy": True, "shuffle_buffer_size": 64}
    plain = load_rows(options(folder / "plain.jsonl", **keys), "train", tokenizer)
    renamed = load_rows(options(folder / "renamed.jsonl", column_mapping=MAPPING, **keys), "train", tokenizer)
    for found, expected in zip(renamed.head(20), plain.head(20), strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert renamed.identity["column_mapping"] == MAPPING and "column_mapping" not in plain.identity


def test_load_dataset_with_another_column_mapping_has_another_cache(folder, options, tokenizer):
    path = folder / "renamed.jsonl"
    swapped = {"question": "tgt", "answer": "src"}
    first, second = (
        load_dataset(options(path, column_mapping=each), "train", tokenizer) for each in (MAPPING, swapped)
    )
    assert first[0].tokens.tolist() != second[0].tokens.tolist()


def test_load_preference_dataset_with_a_column_mapping_reads_pairs(folder, tokenizer):
    rows = [{"q": "a", "better": "b", "worse": "c"}]
    keys = {"chat_template": "none", "data_cache_dir": str(folder / "cache")}
    config = PreferenceDataConfig(column_mapping={"q": "prompt", "better": "chosen", "worse": "rejected"}, **keys)
    assert len(load_preference_dataset(config, PreferenceConfig(), "train", tokenizer, rows=rows)) == 1


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({"query": "src"}, "renamed.jsonl has no query; its columns are question, answer"),
        ({"question": "scr"}, "no row format has scr; the fields of rows are .*src"),
        ({"question": ["src"]}, "no row format has .*src.*;"),
        ({"question": "src", "answer": "src"}, "two columns map to the same field"),
    ],
)
def test_load_dataset_with_an_unusable_column_mapping_names_the_columns(mapping, problem, folder, options, tokenizer):
    with pytest.raises(ValueError, match=f"column_mapping: .*{problem}"):
        load_dataset(options(folder / "renamed.jsonl", column_mapping=mapping), "train", tokenizer)


def test_load_dataset_of_a_row_with_a_column_and_its_new_name_locates_it(options, tokenizer, tmp_path):
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, [RENAMED[0], {**RENAMED[1], "src": "x"}])))
    with pytest.raises(DataError, match=r"my.jsonl:2.*column_mapping renames a column to src, but the row already has"):
        load_dataset(options(tmp_path / "my.jsonl", column_mapping=MAPPING), "train", tokenizer)
