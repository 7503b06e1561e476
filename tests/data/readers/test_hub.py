"""Datasets of the hub, with a stand-in for the package `datasets`, which the tests do not need."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.readers.hub import HubReader

ROWS = [{"src": f"Frage {index}", "tgt": "vier", "system": None} for index in range(1200)]


class Split(list):
    """Stand-in for `datasets.Dataset`."""

    _fingerprint = "f00d"

    @property
    def num_rows(self):
        return len(self)

    def skip(self, count):
        return Split(self[count:])


@pytest.fixture
def hub(monkeypatch):
    """Install the stand-in; the result lists the calls of `load_dataset`."""
    calls = []

    def load(name, task, streaming):
        calls.append((name, task, streaming))
        if name == "owner/absent":
            raise FileNotFoundError("Dataset 'owner/absent' doesn't exist on the Hub\nmore")
        return {"train": Split(ROWS), "validation": Split(ROWS[:2]), "test": Split(ROWS[:1])}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    return calls


def test_load_dataset_by_hub_id_reads_the_split(hub, options, tokenizer):
    dataset = load_dataset(options("owner/name", task_name="main"), "train", tokenizer)
    assert len(dataset) == 1200 and dataset.source(7) == ("owner/name:train", 8)
    assert dataset.stats.unknown_fields == {}, "a null column is not a field"
    dev = load_dataset(options("owner/name"), "dev", tokenizer)
    assert len(dev) == 2 and dev.source(0)[0] == "owner/name:validation"
    assert hub == [("owner/name", "main", False), ("owner/name", None, False)]


def test_hub_reader_resumes_at_every_block(hub):
    reader = HubReader("owner/name", "train", is_stream=True)
    blocks = list(reader.blocks())
    assert [block.end for block in blocks] == [(500,), (1000,), (1200,)] and blocks[-1].fraction == 1.0
    rest = [row.value["src"] for block in reader.blocks((500,)) for row in block.rows()]
    assert rest == [row["src"] for row in ROWS[500:]]


def test_load_dataset_by_an_unknown_hub_id_says_so(hub, options, tokenizer):
    with pytest.raises(ValueError, match=r"could not be fetched .*doesn't exist on the Hub\); without a network"):
        load_dataset(options("owner/absent"), "train", tokenizer)


def test_load_dataset_by_hub_id_without_the_package_names_the_extra(options, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError,
        match=r"no file or folder 'owner/name'; a hub dataset: needs .*pip install 'paddlenlp-ext\[hub\]'",
    ):
        load_dataset(options("owner/name"), "train", tokenizer)
