"""Datasets: paths that are searched, rows that are read, and their statistics."""

from __future__ import annotations

import json
from mmap import mmap

import numpy as np
import pytest

from paddlenlp_ext.data.collate import collate
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.rows.source_row import InvalidRow
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.utils.json_reader import Location

TURN = ("2 + 2?", "vier")
OPENAI = [{"role": "user", "content": "2 + 2?"}]
SAME_ROW = {
    "src_tgt": {"src": "2 + 2?", "tgt": "vier", "context": {"system": "You"}, "id": 3},
    "lists": {"src": ["2 + 2?"], "tgt": ["vier"], "context": {"system": "You"}},
    "messages": {
        "messages": [
            {"role": "system", "content": "You"},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": [{"type": "text", "text": "vi"}, {"type": "text", "text": "er"}]},
        ]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "vier"}],
        "system": "You",
    },
    "messages_row_system": {"messages": [*OPENAI, {"role": "assistant", "content": "vier"}], "system": "You"},
    "messages_context": {
        "messages": [*OPENAI, {"role": "assistant", "content": "vier", "weight": 1, "tool_calls": []}],
        "context": {"system": "You"},
    },
    "said_twice": {"src": "2 + 2?", "tgt": "vier", "context": {"system": "You"}, "system": "You"},
    "alpaca": {"instruction": "2 + 2?", "input": "", "output": "vier", "system": "You"},
    "query": {"query": "2 + 2?", "response": "vier", "system": "You", "history": []},
    "prompt": {"prompt": "2 + 2?", "completion": "vier", "system": "You"},
    "prompt_messages": {"prompt": OPENAI, "completion": [{"role": "assistant", "content": "vier"}], "system": "You"},
    "labels": {"src": ["2 + 2?"], "tgt": ["vier"], "label": [1], "system": "You"},
    "advertise_gen": {"content": "2 + 2?", "summary": "vier", "system": "You"},
}


def write(folder, rows, name="train.json"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", SAME_ROW)
def test_parse_row_in_every_format_returns_the_same_conversation(name):
    assert parse_row(SAME_ROW[name]) == Conversation.from_turns("You", (TURN,))


def test_parse_row_keeps_every_turn():
    expected = (("a", "b"), ("c", "d"), ("e", "f"))
    lists = {"src": ["a", "c", "e"], "tgt": ["b", "d", "f"]}
    history = {"instruction": "e", "output": "f", "history": [["a", "b"], ["c", "d"]]}
    speakers = [
        {"from": who, "value": text} for turn in expected for who, text in zip(("human", "gpt"), turn, strict=True)
    ]
    for row in (lists, history, {"conversations": speakers}):
        assert parse_row(row) == Conversation.from_turns(None, expected)
    assert parse_row({"instruction": "a", "input": "b", "output": "c"}) == Conversation.from_turns(
        None, [("a\nb", "c")]
    )


def test_load_dataset_with_mixed_formats_reads_all(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set", SAME_ROW.values())
    dataset = load_dataset(options(folder), "train", tokenizer)
    assert len(dataset) == len(SAME_ROW)
    assert len({row.tokens.tobytes() for row in (dataset[index] for index in range(len(dataset)))}) == 1


LAYOUTS = {
    "json": ["train.json"],
    "jsonl": ["train.jsonl"],
    "folder": ["train/a.json", "train/b.jsonl"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_dataset_reads_every_layout(layout, options, tokenizer, tmp_path):
    for number, name in enumerate(LAYOUTS[layout]):
        write(tmp_path / "set", [{"src": str(number), "tgt": "vier"}] * 2, name)
    dataset = load_dataset(options(tmp_path / "set"), "train", tokenizer)
    expected = [(str(tmp_path / "set" / name), line) for name in LAYOUTS[layout] for line in (1, 2)]
    assert [dataset.source(index) for index in range(len(dataset))] == expected
    assert dataset.stats.num_read == len(expected)


def test_load_dataset_reads_arrays_and_byte_order_marks(options, tokenizer, tmp_path):
    rows = [{"src": "a", "tgt": "vier"}, {"src": "b", "tgt": "vier"}]
    folder = write(tmp_path / "set", [])
    (folder / "train.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=2).encode())
    dataset = load_dataset(options(folder), "train", tokenizer)
    assert [dataset.source(index)[1] for index in range(2)] == [2, 6]
    (folder / "train.json").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, rows)).encode())
    assert len(load_dataset(options(folder), "train", tokenizer)) == 2


def test_load_dataset_without_the_split_lists_the_paths(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set", [{"src": "a", "tgt": "b"}])
    with pytest.raises(ValueError) as caught:
        load_dataset(options(folder), "dev", tokenizer)
    for name in ("dev.json", "dev.jsonl", "dev/*", "dev-00000-of-00001.*"):
        assert str(folder / name) in str(caught.value)


def test_load_dataset_with_a_split_twice_raises(options, tokenizer, tmp_path):
    folder = write(write(tmp_path / "set", [{"src": "a", "tgt": "b"}]), [{"src": "a", "tgt": "b"}], "train.jsonl")
    with pytest.raises(ValueError, match="exists more than once"):
        load_dataset(options(folder), "train", tokenizer)


@pytest.mark.parametrize(
    ("name", "message"),
    [("inflexion", "did you mean 'inflection'"), ("nowhere/at/all", "built in: inflection"), (None, "not set; use")],
)
def test_load_dataset_with_an_unknown_name_raises(name, message, options, tokenizer):
    with pytest.raises(ValueError, match=message):
        load_dataset(options("", dataset_name_or_path=name), "train", tokenizer)


@pytest.mark.parametrize("place", [".", "home/datasets", "user/.paddlenlp/datasets"])
def test_load_dataset_advertise_gen_is_found_in_the_users_folder(place, options, tokenizer, tmp_path, monkeypatch):
    rows = [{"content": "type#dress*colour#blue", "summary": "A blue dress."}, {"src": "2 + 2?", "tgt": "vier"}]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("PPNLP_HOME", raising=False)
    named = options("", dataset_name_or_path="AdvertiseGen")
    with pytest.raises(ValueError, match=r"AdvertiseGen nor .*user/\.paddlenlp/datasets/AdvertiseGen exists"):
        load_dataset(named, "train", tokenizer)
    write(tmp_path / place / "AdvertiseGen", rows)
    if place.startswith("home"):
        monkeypatch.setenv("PPNLP_HOME", str(tmp_path / "home"))
    assert load_dataset(named, "train", tokenizer).stats.num_read == 2


def test_load_dataset_rows_are_packed_and_collated(options, tokenizer, tmp_path):
    rows = [{"src": f"{number} + 2?", "tgt": "vier" * (number % 5 + 1)} for number in range(50)]
    dataset = load_dataset(options(write(tmp_path / "set", rows)), "train", tokenizer)
    assert dataset.lengths.tolist() == [len(dataset[index].tokens) - 1 for index in range(50)]
    plan = PackingPlan(dataset.lengths, batch_size=2, packing="greedy", capacity=64, seed=1)
    batches = [collate([[dataset[row] for row in pack] for pack in packs]) for packs in plan.epoch(0)]
    assert sum(batch.num_tokens for batch in batches) == dataset.stats.num_tokens - 50
    assert sum(batch.num_target_tokens for batch in batches) == dataset.stats.num_target_tokens
    with pytest.raises(IndexError):
        dataset[50]


def test_prompts_skip_dropped_rows(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set", [])
    long = {"src": "0" * 500, "tgt": "x"}
    rows = [
        {"src": "a", "tgt": "b"},
        {"src": "a"},
        {"src": ["c", "e"], "tgt": ["d", "f"]},
        long,
        {"src": "g", "tgt": "h"},
    ]
    write(folder, rows)
    dataset = load_dataset(options(folder, bad_rows="drop", truncation="drop"), "train", tokenizer)
    prompts = [(tokenizer.decode(ids), answer, question) for ids, answer, question in dataset.prompts()]
    assert prompts == [("a", "b", "a"), ("cd</s>e", "f", "e"), ("g", "h", "g")]
    assert dataset.stats.dropped == {"missing key": 1, "too long": 1}


def test_prompts_of_truncated_rows_end_with_the_last_remaining_question(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set", [{"src": ["a", "3" * 90, "c"], "tgt": ["b", "6" * 40, "d"]}])
    dataset = load_dataset(options(folder, src_length=100), "train", tokenizer)
    ((ids, answer, question),) = dataset.prompts()
    assert (answer, question) == ("6" * 40, "3" * 90) and tokenizer.decode(ids) == "ab</s>" + "3" * 90


def test_load_dataset_autoregressive_makes_every_token_a_target(options, tokenizer, tmp_path):
    rows = [{"src": "Die Antwort"}, {"text": "vier"}, {"src": ["2 + ", "2"], "tgt": "ignored"}]
    folder = write(tmp_path / "set", rows)
    dataset = load_dataset(options(folder, autoregressive=True, chat_template=None), "train", tokenizer)
    texts = [tokenizer.decode(dataset[index].tokens) for index in range(3)]
    assert texts == ["Die Antwort</s>", "vier</s>", "2 + 2</s>"]
    for index in range(3):
        assert dataset[index].loss_mask.tolist() == [False] + [True] * int(dataset.lengths[index])
    with pytest.raises(ValueError, match="no prompts"):
        next(dataset.prompts())
    truncated = load_dataset(options(folder, autoregressive=True, max_length=3), "train", tokenizer)
    assert truncated.stats.num_truncated == 0 and truncated.lengths.max() == 2
    assert (truncated.stats.num_split, truncated.stats.num_split_examples, len(truncated)) == (1, 2, 4)
    bad = load_dataset(
        options(write(tmp_path / "other", [*rows, {"tgt": "a"}, {"src": " "}]), autoregressive=True, bad_rows="drop"),
        "train",
        tokenizer,
    )
    assert bad.stats.dropped == {"missing key": 1, "empty target": 1}


def test_prompts_with_an_empty_prompt_raise(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set", [{"src": "", "tgt": "vier"}])
    with pytest.raises(ValueError, match=r"train\.json:1:1: the prompt is empty"):
        next(load_dataset(options(folder), "train", tokenizer).prompts())


def test_load_dataset_first_token_is_not_a_target(options, tokenizer, tmp_path):
    """Check the loss mask of the first token, which no token precedes that could predict it."""
    folder = write(tmp_path / "set", [{"src": "", "tgt": "vier"}])
    row = load_dataset(options(folder), "train", tokenizer)[0]
    assert row.loss_mask.tolist() == [False] + [True] * (len(row.tokens) - 1)


def test_data_stats_check_asserts_that_rows_add_up():
    account = DataStats(num_read=5, num_untruncated=2, num_truncated=1)
    account.drop(
        [InvalidRow(Location("f", 1, 1), "empty target", "x"), InvalidRow(Location("f", 2, 3), "empty target", "y")]
    )
    account.check()
    assert account.dropped == {"empty target": 2} and account.num_dropped == 2
    assert DataStats.from_json(json.loads(json.dumps(account.to_json()))) == account
    table = account.table("dev")
    assert table.splitlines()[0] == "dev" and "dropped: empty target" in table
    account.num_untruncated += 1
    with pytest.raises(AssertionError, match="5 rows read, but 6"):
        account.check()


def test_load_dataset_with_an_unknown_bad_rows_raises(options, tokenizer, tmp_path):
    with pytest.raises(ValueError, match='bad_rows: "ignore" is not one of: error, drop'):
        load_dataset(options(tmp_path, bad_rows="ignore"), "train", tokenizer)


def test_load_dataset_with_a_task_name_raises(options, tokenizer):
    with pytest.raises(ValueError, match="task_name"):
        load_dataset(options("inflection", task_name="verbs"), "train", tokenizer)


def test_load_dataset_memory_maps_rows(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set", [{"src": "a", "tgt": "b"}])
    row = load_dataset(options(folder), "train", tokenizer)[0]
    owner = row.tokens
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, mmap) and row.tokens.dtype == np.int32 and row.loss_mask.dtype == bool
