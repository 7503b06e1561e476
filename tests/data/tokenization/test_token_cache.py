"""Token cache: it is reused exactly if nothing that determines the tokens has changed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.readers.dataset_files import open_reader
from paddlenlp_ext.data.rows.source_row import InvalidRow
from paddlenlp_ext.data.tokenization import cache_key as cache_key_module
from paddlenlp_ext.data.tokenization import token_cache as token_cache_module
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenWriter
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.token_cache import load_or_build
from paddlenlp_ext.utils import locks
from paddlenlp_ext.utils.json_reader import Location
from tests.data.tiny_tokenizers import CHATML, LLAMA3, make_marking_tokenizer, make_tokenizer
from tests.golden.generators.write_token_cache import data_config, make_words_tokenizer

GOLDEN_DATA = Path(__file__).parents[2] / "golden/data"

ROWS = [{"src": "2 + 2?", "tgt": "vier"}, {"src": "Und?", "tgt": "Antwort"}]


def write(folder: Path, rows=ROWS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dev.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def key_of(options, tmp_path, monkeypatch):
    """Return a function that loads a split and returns the name of its cache."""
    names = []
    real = load_or_build
    monkeypatch.setattr(
        token_cache_module, "load_or_build", lambda folder, build: names.append(folder.name) or real(folder, build)
    )

    def load(tokenizer=None, split="train", folder=None, **changed):
        folder = folder or write(tmp_path / "set")
        load_dataset(options(folder, **changed), split, tokenizer or make_tokenizer(bos="<s>"))
        return names[-1]

    return load


def with_normalizer():
    tokenizer = make_tokenizer(bos="<s>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def with_token_added():
    tokenizer = make_tokenizer(bos="<s>")
    tokenizer.add_tokens(["vier"])
    return tokenizer


def must_not_run(*_):
    raise AssertionError("tokenized again")


def template_file(tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text)
    return str(path)


CHANGES = {
    "row": lambda tmp_path: {"folder": write(tmp_path / "set", [*ROWS[:1], {"src": "Und?", "tgt": "antwort"}])},
    "order of rows": lambda tmp_path: {"folder": write(tmp_path / "set", ROWS[::-1])},
    "name of the folder": lambda tmp_path: {"folder": write(tmp_path / "other")},
    "split": lambda _: {"split": "dev"},
    "src_length": lambda _: {"src_length": 65},
    "max_length": lambda _: {"max_length": 129},
    "truncation": lambda _: {"truncation": "left"},
    "bad_rows": lambda _: {"bad_rows": "drop"},
    "autoregressive": lambda _: {"autoregressive": True},
    "template": lambda tmp_path: {"chat_template": template_file(tmp_path, CHATML)},
    "tokenizer's vocabulary": lambda _: {"tokenizer": make_marking_tokenizer()},
    "tokenizer's normalizer": lambda _: {"tokenizer": with_normalizer()},
    "tokenizer's end token": lambda _: {"tokenizer": make_tokenizer(bos="<s>", eos="<|im_end|>")},
    "tokenizer's post-processor": lambda _: {"tokenizer": make_tokenizer(bos="<s>", adds_bos=True)},
    "token added": lambda _: {"tokenizer": with_token_added()},
}


@pytest.mark.parametrize("name", CHANGES)
def test_cache_key_with_another_input_changes(name, key_of, tmp_path):
    before = key_of()
    assert key_of(**CHANGES[name](tmp_path)) != before


def test_cache_key_with_a_renamed_template_file_is_unchanged(key_of, tmp_path):
    first = key_of(chat_template=template_file(tmp_path, CHATML))
    assert key_of(chat_template=template_file(tmp_path, LLAMA3)) != first
    other = tmp_path / "renamed.jinja"
    other.write_text(CHATML)
    assert key_of(chat_template=str(other)) == first


def dated(tmp_path, monkeypatch, day: str, variable: str) -> dict[str, str]:
    """Return the key of a template that writes the date, from the clock or from Llama 3's `date_string`."""
    from transformers.utils import chat_template_utils

    class Clock(chat_template_utils.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.strptime(day, "%d %b %Y")

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    clock = "strftime_now('%d %b %Y')"
    return {"chat_template": template_file(tmp_path, f"{{{{ {variable} | default({clock}) }}}}\n" + CHATML)}


@pytest.mark.parametrize("variable", ["absent", "date_string"])
def test_cache_key_with_a_dated_template_is_the_same_on_every_day(key_of, tmp_path, monkeypatch, variable):
    keys = [key_of(**dated(tmp_path, monkeypatch, day, variable)) for day in ("01 Jan 2026", "02 Jan 2026")]
    assert keys[0] == keys[1]


def test_cache_key_with_another_date_of_the_template_changes(key_of, tmp_path, monkeypatch):
    template = dated(tmp_path, monkeypatch, "01 Jan 2026", "absent")
    keys = [key_of(**template, chat_template_kwargs={"strftime_now": day}) for day in ("2026-01-01", "2026-01-02")]
    assert keys[0] != keys[1]
    with pytest.raises(ValueError, match="chat_template_kwargs: strftime_now must be a date such as 2024-07-26"):
        key_of(**template, chat_template_kwargs={"strftime_now": "today"})


def test_cache_key_with_another_tokenization_or_library_version_changes(key_of, monkeypatch):
    before = key_of()
    real = cache_key_module.version
    for library in ("tokenizers", "transformers", "jinja2"):
        monkeypatch.setattr(cache_key_module, "version", lambda name, new=library: "99" if name == new else real(name))
        assert key_of() != before
    monkeypatch.setattr(cache_key_module, "version", real)
    assert key_of() == before
    monkeypatch.setattr(cache_key_module, "TOKENIZATION_VERSION", cache_key_module.TOKENIZATION_VERSION + 1)
    assert key_of() != before


@pytest.mark.parametrize(
    ("row", "is_version_1"),
    [
        ('{"src": "a", "tgt": "b"}', True),
        ('{"messages" : [{"role": "user", "content": "say \\"weight\\""}]}', True),
        ('{"src": "a", "tgt": "b", "weight": 0}', False),
        ('{"src": "a", "tgt": "<think>\\n\\n</think>\\n\\nb"}', False),
        ('{"instruction": "", "input": "a", "output": "b"}', False),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "value": "a"}]}]}', False),
    ],
)
def test_cache_key_of_rows_that_version_1_read_alike_is_that_of_version_1(tmp_path, row, is_version_1):
    file = tmp_path / "train.json"
    file.write_text(row)
    parts = {"tokenizer": "t", "template_text": "", "options": {}}
    key = cache_key_module.cache_key(readers=[open_reader(file)], **parts)
    facts = cache_key_module.version_entries(is_version_1)
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    expected = {"files": [(str(file), content)], "tokenizer": "t", "template": "", "options": {}, **facts}
    assert key == hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
@pytest.mark.parametrize(
    "text",
    [
        b'{"src": "a", "tgt" : "b: \\"x\\":"}\n{"tgt"\n:1}',
        b'{"src": "a", "weight" \t : 0}',
        b'{"src": "\\"", "tgt": "a", "n":1}',
        b'""""""::"":"a":',
        b"no quote at all:",
    ],
)
def test_plain_keys_in_pieces_are_those_of_the_full_text(text, size):
    keys = cache_key_module._PlainKeys()
    for start in range(0, len(text), size):
        keys.observe(text[start : start + size])
    found = {match[1] for match in re.finditer(rb'"([^"]*)"\s*:', text)}
    assert keys.are_plain == (found <= cache_key_module._PLAIN_KEYS)


@pytest.mark.parametrize("white", ["", " " * 300])
@pytest.mark.parametrize(
    "end", ['": 1', '"', "", '</think>"', '", "src"WHITE: 1', '", "key"WHITE: 1', '"WHITEx, "src": 1']
)
@pytest.mark.parametrize("start", ['{"src": "', '{"', '{"src'])
def test_plain_keys_beside_long_texts_in_pieces_are_those_of_the_full_text(start, end, white):
    text = (start + "long " * 100 + end.replace("WHITE", white)).encode()
    whole = cache_key_module._PlainKeys()
    whole.observe(text)
    for size in (3, 50, 200):
        keys = cache_key_module._PlainKeys()
        for begin in range(0, len(text), size):
            keys.observe(text[begin : begin + size])
            assert len(keys._rest) < 600
        assert keys.are_plain == whole.are_plain


def test_load_dataset_with_a_cache_of_an_older_commit_reads_it(tmp_path, monkeypatch):
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN_DATA / "token_cache", folder)
    monkeypatch.chdir(folder)
    versions = json.loads((folder / "versions.json").read_text())
    monkeypatch.setattr(cache_key_module, "version", versions.__getitem__)
    monkeypatch.setattr(token_cache_module, "tokenize", must_not_run)
    dataset = load_dataset(DataConfig(**vars(data_config())), "train", make_words_tokenizer())
    account = DataStats(
        num_read=4,
        num_untruncated=2,
        num_truncated=1,
        dropped={"missing key": 1},
        num_tokens=22,
        num_target_tokens=10,
        num_truncated_tokens=2,
        num_lost_target_tokens=None,
        examples=(
            InvalidRow(Location("rows/train.json", 4, 1), "missing key", "the row has the keys 'src' but no 'tgt'"),
        ),
    )
    assert dataset.stats == account
    assert [row.tokens.tolist() for row in dataset] == [
        [3, 5, 8, 7, 4, 2],
        [6, 8, 3, 2, 4, 8, 5, 5, 2],
        [7, 7, 7, 7, 7, 4, 2],
    ]
    assert [row.loss_mask.astype(int).tolist() for row in dataset] == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert [dataset.source(index) for index in range(3)] == [("rows/train.json", line) for line in (1, 2, 3)]
    assert [prompt[1:] for prompt in dataset.prompts()] == [
        ("plum blue", "red apple ="),
        ("apple apple", "blue ="),
        ("blue", "plum plum plum plum plum plum ="),
    ]
    written = {path.name for path in (folder / "cache").glob("*/*")}
    assert written == {
        "account.json",
        *(f"{name}.npy" for name in ("tokens", "learned", "offsets", "places", "answers")),
    }


UNRELATED = {
    "nothing": {},
    "packing": {"zero_padding": True, "greedy_zero_padding": True},
    "padding": {"pad_to_multiple_of": 8, "pad_to_max_length": True},
    "lazy": {"lazy": True},
}


@pytest.mark.parametrize("name", UNRELATED)
def test_cache_key_with_an_unrelated_option_is_unchanged(name, key_of):
    assert key_of(**UNRELATED[name]) == key_of()


def test_tokenizer_fingerprint_after_use_is_unchanged():
    tokenizer = make_tokenizer(bos="<s>")
    tokenizer.pad_token = "<unk>"
    before = cache_key_module.tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert cache_key_module.tokenizer_fingerprint(tokenizer) == before


def test_cache_key_with_other_files_in_the_folder_is_unchanged(key_of, tmp_path):
    before = key_of()
    (tmp_path / "set" / "notes.txt").write_text("x")
    assert key_of(folder=tmp_path / "set") == before


def test_load_dataset_twice_tokenizes_once(options, tokenizer, tmp_path, monkeypatch):
    folder = write(tmp_path / "set")
    first = load_dataset(options(folder), "train", tokenizer)

    monkeypatch.setattr(token_cache_module, "tokenize", must_not_run)
    second = load_dataset(options(folder), "train", tokenizer)
    assert second.stats == first.stats
    for index in range(len(first)):
        np.testing.assert_array_equal(second[index].tokens, first[index].tokens)
        np.testing.assert_array_equal(second[index].loss_mask, first[index].loss_mask)
    assert list(second.prompts()) == list(first.prompts())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped": flip,
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["tokens.npy", "learned.npy", "offsets.npy", "places.npy", "answers.npy", "account.json", "sums.json"]
)
def test_load_dataset_with_a_damaged_cache_tokenizes_again(name, damage, options, tokenizer, tmp_path, caplog):
    folder = write(tmp_path / "set")
    first = load_dataset(options(folder), "train", tokenizer)
    rows = [(row.tokens.tolist(), row.loss_mask.tolist()) for row in first]
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    content = file.read_bytes()
    DAMAGE[damage](file)
    again = load_dataset(options(folder), "train", tokenizer)
    assert [(row.tokens.tolist(), row.loss_mask.tolist()) for row in again] == rows
    if (name, damage) != ("sums.json", "missing"):  # as in caches of earlier versions, which are read
        assert file.read_bytes() == content
        assert f"{file.parent}: the cached tokens are damaged ({name})" in caplog.text


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "account.json"])
def test_load_dataset_with_an_unreadable_cache_of_an_earlier_version_tokenizes_again(
    name, options, tokenizer, tmp_path
):
    folder = write(tmp_path / "set")
    rows = [row.tokens.tolist() for row in load_dataset(options(folder), "train", tokenizer)]
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    (file.parent / "sums.json").unlink()
    DAMAGE["zeroed"](file)
    assert [row.tokens.tolist() for row in load_dataset(options(folder), "train", tokenizer)] == rows


def test_load_or_build_beside_a_process_that_stands_still_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(locks, "_POLL_S", 0.02)
    folder = tmp_path / "train-0"
    lock = folder.with_suffix(".lock")
    with locks.waiting_lock(lock, folder, "wait"), pytest.raises(ValueError, match="holds the lock") as caught:
        load_or_build(folder, must_not_run)
    assert str(caught.value).startswith(f"{lock}: process {os.getpid()} on ")
    assert "holds the lock and has written nothing" in str(caught.value)
    assert "set data_cache_dir" in str(caught.value)


def test_load_dataset_with_an_unwritable_cache_names_the_key(options, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="set data_cache_dir"):
        load_dataset(options(write(tmp_path / "set"), data_cache_dir=str(tmp_path / "file")), "train", tokenizer)


def test_load_dataset_with_a_half_written_cache_tokenizes_again(options, tokenizer, tmp_path):
    folder = write(tmp_path / "set")
    load_dataset(options(folder), "train", tokenizer)
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    made.rename(made.with_name(f".{made.name}.incomplete"))
    assert len(load_dataset(options(folder), "train", tokenizer)) == 2
    assert made.is_dir()


def build_counted(folder: Path, log: Path) -> None:
    def build(folder):
        with open(log, "a") as file:
            file.write("built\n")
        with TokenWriter(folder):
            return DataStats()

    arrays, _ = load_or_build(folder, build)
    assert len(arrays) == 0


def test_load_or_build_in_several_processes_builds_once(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "cache" / "train-0", tmp_path / "log")
    processes = [context.Process(target=build_counted, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert arguments[1].read_text() == "built\n"


@pytest.mark.parametrize(("bad_rows", "is_version_1"), [("error", True), ("drop", False)])
def test_cache_key_with_dropped_rows_that_a_template_now_writes_is_new(
    key_of, tmp_path, monkeypatch, bad_rows, is_version_1
):
    """Check that a cache without rows that earlier versions dropped is not used again."""
    asked = []
    real = cache_key_module.version_entries
    monkeypatch.setattr(cache_key_module, "version_entries", lambda plain: asked.append(plain) or real(plain))
    key_of(chat_template=template_file(tmp_path, CHATML), bad_rows=bad_rows)
    key_of(chat_template="none", bad_rows=bad_rows)
    assert asked == [is_version_1, True]
