"""Mixtures of stored datasets: shares of the rows, and passes over each dataset."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.mixture import MixedDataset, next_source, parse_weights, schedule
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.data.training_rows import load_rows
from tests.common.training import make_config


def make_mixture(tmp_path, options, tokenizer, prob, *counts, **keys) -> MixedDataset:
    folders = []
    for name, count in zip("abc", counts, strict=False):
        rows = [{"src": f"{name} {index}", "tgt": "vier " * (1 + index % 5)} for index in range(count)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.json").write_text("\n".join(map(json.dumps, rows)))
        folders.append(str(tmp_path / name))
    config = options("", dataset_name_or_path=folders, train_dataset_prob=prob, **keys)
    return load_rows(config, "train", tokenizer)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, 0.2, 0.1), (0.99, 0.01), (1 / 3, 2 / 3)])
def test_schedule_follows_next_source_and_keeps_each_share_within_a_row(weights):
    drawn, sources, numbers = [0] * len(weights), [], []
    for _ in range(500):
        sources.append(next_source(drawn, weights))
        numbers.append(drawn[sources[-1]])
        drawn[sources[-1]] += 1
        assert np.abs(np.array(drawn) - sum(drawn) * np.array(weights)).max() <= 1
    for first, count in ((0, 500), (0, 1), (137, 200), (499, 1)):
        found = schedule(weights, first, count)
        assert found[0].tolist() == sources[first : first + count]
        assert found[1].tolist() == numbers[first : first + count]


@pytest.mark.parametrize("greedy", [False, True])
def test_mixed_dataset_epochs_have_the_weights_in_rows(greedy, tmp_path, options, tokenizer):
    """Check shares in numbers of rows, over the packed steps of an epoch: within 1 % of the weights."""
    rows = make_mixture(tmp_path, options, tokenizer, "6,3,1", 300, 100, 40)
    assert rows.rows_per_epoch == 500 and len(rows) == 440 and rows.stats.num_read == 440
    config = make_config("out", zero_padding=True, greedy_zero_padding=greedy, max_length=128)
    order = build_data_order(config, rows)
    read = []
    for step in order.step_batches():
        read += [rows.source(row)[0].split("/")[-2] for row in step.row_indices]
        if step.is_last:
            break
    assert len(read) == 500
    np.testing.assert_allclose([read.count(name) / len(read) for name in "abc"], (0.6, 0.3, 0.1), atol=0.01)


def test_mixed_dataset_reads_each_dataset_to_its_end_before_it_starts_over(tmp_path, options, tokenizer):
    rows = make_mixture(tmp_path, options, tokenizer, "0.75,0.25", 7, 12)
    order = np.concatenate([rows.epoch_rows(epoch, seed=3) for epoch in range(4)])
    assert rows.rows_per_epoch == 48 and set(rows.epoch_rows(0, 3)) == set(range(19))
    for part, (first, count) in enumerate(((0, 7), (7, 12))):
        own = order[(order >= first) & (order < first + count)]
        passes = [own[start : start + count] for start in range(0, len(own) // count * count, count)]
        assert all(sorted(each) == list(range(first, first + count)) for each in passes)
        assert len({tuple(each) for each in passes}) == len(passes), f"dataset {part} is shuffled anew"
    assert (rows.epoch_rows(0, seed=4) != rows.epoch_rows(0, seed=3)).any()


def test_load_rows_without_weights_reads_datasets_one_after_the_other(tmp_path, options, tokenizer):
    rows = make_mixture(tmp_path, options, tokenizer, None, 3, 2)
    assert [rows.source(index)[0].split("/")[-2] for index in range(len(rows))] == list("aaabb")


def test_load_dataset_dev_split_is_that_of_the_datasets_that_have_one(tmp_path, options, tokenizer):
    rows = make_mixture(tmp_path, options, tokenizer, None, 3, 2)
    config = options("", dataset_name_or_path=f"{tmp_path / 'a'},{tmp_path / 'b'}")
    with pytest.raises(ValueError, match=r"a: no 'dev' split"):
        load_dataset(config, "dev", tokenizer)
    (tmp_path / "b" / "dev.json").write_text('{"src": "a", "tgt": "b"}')
    assert len(rows) == 5 and len(load_dataset(config, "dev", tokenizer)) == 1
    (tmp_path / "b" / "train.json").unlink()
    with pytest.raises(ValueError, match=r"b: no 'train' split"):
        load_dataset(config, "train", tokenizer)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("0.5", "1 weight for 2 datasets"),
        ("0.5,0.3,0.2", "3 weights for 2 datasets"),
        ("0.5,half", "not a list of numbers"),
        ("1,0", "not positive"),
        ("1,-1", "not positive"),
        ("1,nan", "not positive"),
        ("", "not a list of numbers"),
    ],
)
def test_parse_weights_invalid_weights_are_named(written, message):
    with pytest.raises(ValueError, match=f"train_dataset_prob: .*{message}"):
        parse_weights(written, ("a", "b"))
    assert parse_weights("2, 6", ("a", "b")) == (0.25, 0.75)
