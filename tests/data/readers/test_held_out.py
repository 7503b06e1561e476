"""Rows that `dev_ratio` holds out of the training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset
from paddlenlp_ext.data.readers.dataset_files import open_dataset
from paddlenlp_ext.data.readers.held_out import is_held_out
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.data.training_rows import load_rows

ROWS = [{"src": f"question {index % 190}", "tgt": f"answer {index % 190}"} for index in range(200)]


def write_rows(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def rows_of(path: str, split: str, **keys: Any) -> list[Any]:
    readers = open_dataset(DataConfig(dataset_name_or_path=path, **{"dev_ratio": 0.2, **keys}), split)
    return [row.value for reader in readers for row in reader.rows() if isinstance(row, SourceRow)]


def texts(rows: list[Any]) -> list[str]:
    return [json.dumps(row, sort_keys=True) for row in rows]


def test_is_held_out_depends_on_the_content_and_holds_out_the_ratio():
    held = {ratio: {n for n in range(20_000) if is_held_out({"src": n}, ratio)} for ratio in (0.0, 0.05, 0.1, 0.999)}
    assert not held[0.0] and held[0.05] < held[0.1] < held[0.999]
    assert abs(len(held[0.1]) - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    assert all(is_held_out({"a": n, "b": 1}, 0.5) == is_held_out({"b": 1, "a": n}, 0.5) for n in range(50))


def test_open_dataset_with_dev_ratio_divides_the_rows_by_content(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl")
    train, dev = rows_of(path, "train"), rows_of(path, "dev")
    assert sorted(texts(train + dev)) == sorted(texts(ROWS)) and len(dev) > 20
    assert not set(texts(train)) & set(texts(dev)), "equal rows are on one side"
    as_array = tmp_path / "array.json"
    as_array.write_text(json.dumps([dict(reversed(row.items())) for row in reversed(ROWS)]))
    assert sorted(texts(rows_of(str(as_array), "dev"))) == sorted(texts(dev))
    assert set(texts(rows_of(write_rows(tmp_path / "half.jsonl", ROWS[:100]), "dev"))) <= set(texts(dev))


def test_open_dataset_with_a_number_of_rows_holds_out_the_same_rows_as_the_ratio(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl")
    assert rows_of(path, "dev", dev_ratio=40) == rows_of(path, "dev", dev_ratio=0.2)
    assert rows_of(path, "train", dev_ratio=40) == rows_of(path, "train", dev_ratio=0.2)
    both = f"{path},{write_rows(tmp_path / 'more.jsonl')}"
    assert rows_of(both, "dev", dev_ratio=40) == rows_of(both, "dev", dev_ratio=0.1)
    with pytest.raises(ValueError, match=r"dev_ratio: 1,000 rows cannot be held out of 200; set a smaller number, or"):
        rows_of(path, "train", dev_ratio=1000)


def test_open_dataset_with_dev_ratio_keeps_unreadable_rows_on_the_training_side(tmp_path: Path):
    path = Path(write_rows(tmp_path / "rows.jsonl"))
    path.write_text(path.read_text() + "\n{broken\n")
    sides = [open_dataset(DataConfig(dataset_name_or_path=str(path), dev_ratio=0.2), s) for s in ("train", "dev")]
    invalid = [sum(not isinstance(row, SourceRow) for reader in side for row in reader.rows()) for side in sides]
    assert invalid == [1, 0]


def test_open_dataset_with_dev_ratio_and_a_dev_split_fails(tmp_path: Path):
    for name in ("train", "test"):
        write_rows(tmp_path / "data" / f"{name}.json")
    assert len(rows_of(str(tmp_path / "data"), "train")) < len(ROWS) == len(rows_of(str(tmp_path / "data"), "test"))
    write_rows(tmp_path / "data" / "dev.json")
    for path in (str(tmp_path / "data"), "inflection"):
        for split in ("train", "dev"):
            with pytest.raises(ValueError, match=r"dev_ratio: .* has a dev split; remove dev_ratio"):
                rows_of(path, split)


def test_load_dataset_with_another_dev_ratio_has_another_cache(tmp_path: Path, options, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl")
    counts = [
        len(load_dataset(options(path, dev_ratio=ratio, eval_dataset_path=None), split, tokenizer))
        for ratio in (0.2, 0.4, 0.0)
        for split in (("train", "dev") if ratio else ("train",))
    ]
    assert counts[0] + counts[1] == counts[2] + counts[3] == counts[4] == len(ROWS)
    assert counts[1] == len(rows_of(path, "dev")) < counts[3]


def test_load_dataset_without_rows_on_a_side_names_dev_ratio(tmp_path: Path, options, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match=r"no valid rows: dev_ratio 1e-06 holds out no rows; set a larger value"):
        load_dataset(options(path, dev_ratio=1e-6, eval_dataset_path=None), "dev", tokenizer)


def test_load_dataset_of_an_empty_file_names_the_file_and_not_dev_ratio(tmp_path: Path, options, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [])
    with pytest.raises(ValueError, match=r"rows\.jsonl: no valid rows, because the file is empty"):
        load_dataset(options(path, dev_ratio=0.1, eval_dataset_path=None), "train", tokenizer)


def test_load_rows_of_a_stream_reads_only_the_training_side(tmp_path: Path, options, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl")
    stream = load_rows(options(path, lazy=True, dev_ratio=0.2), "train", tokenizer)
    count = len(next(stream.windows()).arrays)
    assert count == len(rows_of(path, "train")) < len(ROWS)


def test_load_preference_dataset_holds_out_rows_of_the_training_file(tmp_path: Path, tokenizer):
    pairs = [{"prompt": f"a {index}", "chosen": "b", "rejected": "c"} for index in range(50)]
    keys = {"chat_template": "none", "data_cache_dir": str(tmp_path / "cache"), "dev_ratio": 0.3}
    config = PreferenceDataConfig(train_dataset_path=write_rows(tmp_path / "pairs.jsonl", pairs), **keys)
    train, dev = (load_preference_dataset(config, PreferenceConfig(), split, tokenizer) for split in ("train", "dev"))
    assert len(train) + len(dev) == 50 and 5 < len(dev) < 25
    assert config.paths(train=True, evaluate=True)["dev_dataset_path"] == config.train_dataset_path
