"""Layouts of datasets: one file, folders of splits, downloads of the hub, `save_to_disk`, and dataset_info.json."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.ipc
import pytest

from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset
from paddlenlp_ext.data.readers.dataset_files import MissingSplitError, find_files, open_dataset


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def write(folder, *names):
    """Write files with a row each."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"src": "a", "tgt": "b"}')


def save(folder, files=("data-00000-of-00002.arrow", "data-00001-of-00002.arrow"), **state):
    """Write a folder as `Dataset.save_to_disk` does, with two rows in each file and the file of another cache."""
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist([{"src": "a", "tgt": "b"}] * 2)
    for name in (*files, "cache-f00d.arrow"):
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    content = {"_data_files": [{"filename": name} for name in files], **state}
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (["train.csv", "valid.csv"], "dev", ["valid.csv"]),
        (["train.json", "val/a.json", "val/b.json"], "dev", ["val/a.json", "val/b.json"]),
        (["eval.json", "test.json"], "dev", ["eval.json"]),
        (["train.json", "test.json"], "dev", ["test.json"]),
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"], "train", None),
        (["train-00000-of-00001-0123abcd.parquet"], "train", None),
        (["data/validation-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], "dev", None),
    ],
)
def test_find_files_in_a_folder_returns_the_split(names, split, found, folder):
    write(folder, *names)
    expected = [name for name in names if found is None and "test" not in name] or found
    assert [str(path.relative_to(folder)) for path in find_files(str(folder), split)] == expected


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["dev.json", "validation.json"], "more than one eval split: dev and validation; set eval_dataset_path"),
        (["data/dev-00000-of-00001.json", "dev.json"], "'dev' exists more than once"),
        (
            ["dev-00000-of-00003.json", "dev-00002-of-00003.json"],
            r"2 files dev-\*-of-\*, but 3 are expected according to their",
        ),
        (["train.json"], "no 'dev' split .*validation, valid, val, eval, test.*add one of .*/dev.json"),
    ],
)
def test_find_files_of_an_unclear_split_raises(names, problem, folder):
    write(folder, *names)
    with pytest.raises(ValueError, match=problem):
        find_files(str(folder), "dev")


def test_load_dataset_from_saved_folders_reads_the_files_that_state_json_lists(folder, options, tokenizer):
    save(folder / "one")
    save(folder / "several" / "train")
    save(folder / "several" / "test", files=("data-00000-of-00001.arrow",))
    assert [len(load_dataset(options(folder / name), "train", tokenizer)) for name in ("one", "several")] == [4, 4]
    dev = load_dataset(options(folder / "several"), "dev", tokenizer)
    assert dev.source(1) == (str(folder / "several/test/data-00000-of-00001.arrow"), 2)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"state.json: missing files: .*gone.arrow; save the dataset"),
        ({"_data_files": []}, "state.json: missing files: all"),
        (
            {"_indices_data_files": [{"filename": "indices.arrow"}]},
            "an index file selects some of the stored rows; save",
        ),
    ],
)
def test_find_files_of_an_incomplete_saved_folder_raises(state, problem, folder):
    save(folder / "one", **state)
    with pytest.raises(ValueError, match=problem):
        find_files(str(folder / "one"), "train")


MESSAGES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def register(folder, row, **entry):
    """Write a dataset_info.json of LLaMA-Factory with the dataset `demo`, whose file has one row."""
    (folder / "rows.json").write_text(json.dumps([row]))
    (folder / "dataset_info.json").write_text(json.dumps({"demo": {"file_name": "rows.json", **entry}}))
    return str(folder / "demo")


@pytest.mark.parametrize(
    ("row", "entry", "value"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, {}, {"instruction": "a", "input": "", "output": "b"}),
        (
            {"q": "a", "more": "", "a": "b"},
            {"columns": {"prompt": "q", "query": "more", "response": "a"}},
            {"instruction": "a", "input": "", "output": "b"},
        ),
        (
            {"instruction": "a", "input": "left out", "output": "b", "system": "left out", "id": 3},
            {"columns": {"prompt": "instruction", "response": "output"}},
            {"instruction": "a", "output": "b", "id": 3},
        ),
        ({"content": "a b"}, {"columns": {"prompt": "content"}}, {"text": "a b"}),
        ({"instruction": "a", "output": "b"}, {"columns": {"prompt": "output"}}, {"text": "b"}),
        (
            {"instruction": "left out", "question": "a", "output": "b"},
            {"columns": {"prompt": "question", "response": "output"}},
            {"instruction": "a", "output": "b"},
        ),
        (
            {"turns": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": "left out"},
            {"formatting": "sharegpt", "columns": {"messages": "turns"}},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        ),
        (
            {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"formatting": "sharegpt", "tags": MESSAGES},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ),
    ],
)
def test_open_dataset_of_a_registered_name_reads_the_file_and_its_columns(row, entry, value, folder, options):
    (reader,) = open_dataset(options(register(folder, row, **entry)), "train")
    assert reader.name == str(folder / "rows.json")
    assert [read.value for read in reader.rows()] == [value]


def test_dev_rows_of_a_registered_dataset_are_held_out_or_missing(folder, options):
    name = register(folder, {"instruction": "a", "output": "b"})
    with pytest.raises(MissingSplitError, match="eval_dataset_path: not set"):
        open_dataset(options(name), "dev")
    held_out = (open_dataset(options(name, dev_ratio=0.5), split)[0] for split in ("train", "dev"))
    assert sum(len(list(reader.rows())) for reader in held_out) == 1


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"formatting": "parrot"}, "dataset_info.json: demo: formatting 'parrot' is not supported; use alpaca"),
        ({"file_name": "gone.json"}, "demo: file_name: .*gone.json does not exist; restore the file"),
        ({"columns": ["a"]}, "demo: columns must be an object whose values are texts"),
        ({"formatting": "sharegpt", "tags": {"user_tag": [1]}}, "demo: tags must be an object whose values are texts"),
        ({"num_samples": 5}, "demo: num_samples is not supported; remove it"),
        ({"formatting": "sharegpt", "tags": {"role_tag": "who"}}, r"role_tag, content_tag \('who', 'value'\) is not"),
        ({"formatting": "sharegpt", "tags": {"user_tag": "Q"}}, "user_tag 'Q' is not supported; write messages with"),
        ({"columns": {"images": "pictures"}}, "dataset_info.json: demo: columns: no row format has images"),
    ],
)
def test_open_dataset_of_an_unsupported_entry_raises(entry, problem, folder, options):
    name = register(folder, {"instruction": "a", "output": "b", "pictures": []}, **entry)
    with pytest.raises(ValueError, match=problem):
        open_dataset(options(name), "train")


def test_open_dataset_of_a_folder_with_registered_names_lists_them(folder, options):
    register(folder, {"instruction": "a", "output": "b"})
    with pytest.raises(MissingSplitError, match=f"dataset_info.json has the datasets {folder / 'demo'}"):
        open_dataset(options(folder), "train")
    (folder / "dataset_info.json").write_text('{"demo": {"hf_hub_url": "a/b"}}')
    with pytest.raises(ValueError, match="demo: no file_name; set dataset_name_or_path to the hub id"):
        open_dataset(options(folder / "demo"), "train")


def test_open_dataset_of_a_mistyped_registered_name_suggests_the_name(folder, options, monkeypatch):
    register(folder, {"instruction": "a", "output": "b"})
    monkeypatch.chdir(folder.parent)  # where the name has the form of a hub id
    with pytest.raises(ValueError, match=r"'set/demos' is neither a path .*_info\.json; did you mean 'demo'\?"):
        open_dataset(options("set/demos"), "train")
    monkeypatch.chdir(folder)
    assert open_dataset(options("inflection"), "train")


@pytest.mark.parametrize("name", ["my.json", "my.jsonl", "my.csv"])
def test_open_dataset_of_a_file_has_training_rows_unless_it_is_a_dev_set(name, folder, options):
    write(folder, name, "both/train.json", "both/dev.json")
    path = str(folder / name)
    assert [reader.name for reader in open_dataset(options(path), "train")] == [path]
    with pytest.raises(
        MissingSplitError, match=f"eval_dataset_path: not set, and the rows of {path} are training rows"
    ):
        open_dataset(options(path), "dev")
    assert [reader.name for reader in open_dataset(options(path, eval_dataset_path=(path,)), "dev")] == [path]
    together = f"{path},{folder / 'both'}"
    assert [reader.name for reader in open_dataset(options(together), "dev")] == [str(folder / "both/dev.json")]


def test_load_preference_dataset_from_a_file_has_no_dev_split(folder, tokenizer):
    (folder / "my.json").write_text('[{"prompt": "a", "chosen": "b", "rejected": "c"}]')
    keys = {"chat_template": "none", "data_cache_dir": str(folder / "cache")}
    config = PreferenceDataConfig(dataset_name_or_path=str(folder / "my.json"), **keys)
    assert len(load_preference_dataset(config, PreferenceConfig(), "train", tokenizer)) == 1
    with pytest.raises(MissingSplitError, match="are training rows"):
        load_preference_dataset(config, PreferenceConfig(), "dev", tokenizer)
