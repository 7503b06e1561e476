"""Streams: every row once per epoch, exact resume, mixtures, constant memory."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.readers import json_lines
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.sampler import build_data_order, check_same_data_order, data_order_settings
from paddlenlp_ext.data.streaming import shuffle_buffer as stream_module
from paddlenlp_ext.data.streaming import step_order as stream_order
from paddlenlp_ext.data.training_rows import load_rows
from tests.common.training import make_config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of two files with 150 rows of many lengths, read in blocks of a few rows."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 700)
    return write(tmp_path / "set", "a", 90, 60)


def write(folder, name, *counts):
    (folder / "train").mkdir(parents=True)
    for file, count in enumerate(counts):
        rows = [{"src": f"{name}{file}-{index}", "tgt": "vier " * (1 + index * 7 % 11)} for index in range(count)]
        (folder / "train" / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


PACKINGS = {
    "none": {},
    "in_order": {"zero_padding": True},
    "greedy": {"zero_padding": True, "greedy_zero_padding": True},
}


@pytest.fixture
def open_stream(options, tokenizer):
    """Return a function that opens a stream and the order of its steps."""
    opened = []

    def open_(path, num_ranks=1, num_workers=0, **keys):
        data = {"shuffle_buffer_size": 32, "max_length": 64, **keys}
        train = {key: data.pop(key) for key in ("gradient_accumulation_steps", "max_steps") if key in data}
        config = options(path, lazy=True, dataloader_num_workers=num_workers, **data)
        run = make_config("out", per_device_train_batch_size=2, **{"max_steps": 10, **train})
        run = run.__class__(**{**vars(run), "data": config})
        rows = load_rows(config, "train", tokenizer)
        opened.append(rows)
        return rows, build_data_order(run, rows, num_ranks), data_order_settings(run, rows, num_ranks)

    yield open_
    for rows in opened:
        rows.close()


def read(rows, order, count=None, *position):
    """Return the steps, each as the sources and tokens of its rows; without a count, those of one epoch."""
    steps = []
    for step in order.step_batches(*position):
        packs = [
            [[(*rows.source(row), rows[row].tokens.tobytes()) for row in pack] for pack in each]
            for each in step.micro_batches
        ]
        steps.append((step, packs))
        if (count is None and step.is_last) or len(steps) == count:
            return steps
    raise AssertionError("a stream does not end")


def contents(steps):
    return [packs for _, packs in steps]


def sources(steps):
    return [place[:2] for _, packs in steps for each in packs for pack in each for place in pack]


@pytest.mark.parametrize("packing", PACKINGS)
def test_stream_epoch_has_every_row_of_the_dataset_once(packing, folder, open_stream, options, tokenizer):
    rows, order, _ = open_stream(folder, **PACKINGS[packing])
    stored = load_dataset(options(folder, max_length=64), "train", tokenizer)
    expected = {(*stored.source(index), stored[index].tokens.tobytes()) for index in range(len(stored))}
    for epoch in (0, 1):
        steps = read(rows, order, None, epoch)
        found = [row for _, packs in steps for each in packs for pack in each for row in pack]
        assert len(found) == 150 and set(found) == expected
        assert [step.epoch for step, _ in steps] == [epoch] * len(steps)
        assert [step.index for step, _ in steps] == list(range(len(steps)))
        assert [step.is_last for step, _ in steps] == [False] * (len(steps) - 1) + [True]
        fractions = [step.end_fraction for step, _ in steps]
        assert fractions == sorted(fractions) and fractions[-1] == 1.0
        if packing != "none":
            assert all(sum(rows[r].length for r in pack) <= 64 for pack in steps[-1][0].micro_batches[0])
    assert rows.stats.num_read >= 150


def test_stream_rows_are_shuffled_within_the_buffer_by_seed_and_epoch(folder, open_stream):
    rows, order, _ = open_stream(folder)
    first, second = (sources(read(rows, order, None, epoch)) for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second) != first
    window = [line for _, line in first[:32]]
    assert sorted(window) == list(range(1, 33)) != window


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_resumes_at_every_step_with_the_rows_of_one_run(packing, num_workers, folder, open_stream):
    """Check positions in the middle of windows, blocks and files, at the ends of epochs, and other workers."""
    keys = {"gradient_accumulation_steps": 2, **PACKINGS[packing]}
    rows, order, settings = open_stream(folder, **keys)
    num_steps = 2 * len(read(rows, order))
    steps = read(rows, order, num_steps)
    again, same_order, same_settings = open_stream(folder, num_ranks=2, num_workers=num_workers,
                                                **{**keys, "gradient_accumulation_steps": 1})  # fmt: skip
    check_same_data_order(settings, same_settings)
    for position in range(0, num_steps - 1, 2 if num_workers == 0 else 9):
        step, _ = steps[position]
        cursor = json.loads(json.dumps(step.next_cursor))
        index = 0 if step.is_last else step.index + 1
        resumed = read(again, same_order, min(4, num_steps - position - 1), step.epoch + step.is_last, index, cursor)
        assert contents(resumed) == contents(steps[position + 1 : position + 5]), f"resumed after step {position}"
        assert [each.index for each, _ in resumed] == [each.index for each, _ in steps[position + 1 : position + 5]]
        assert resumed[0][0].end_fraction == pytest.approx(steps[position + 1][0].end_fraction)


def test_stream_ranks_divide_the_micro_batches_of_every_step(folder, open_stream):
    rows, order, _ = open_stream(folder, num_ranks=3)
    for step, _ in read(rows, order):
        local = [step.local_micro_batches(rank, 3) for rank in range(3)]
        assert sorted(itertools.chain.from_iterable(local)) == list(range(len(step.micro_batches)))


def test_stream_changed_inputs_are_facts_of_the_order(folder, open_stream):
    _, _, settings = open_stream(folder)
    with pytest.raises(ValueError, match="shuffle_buffer_size was 32, now 40"):
        check_same_data_order(settings, open_stream(folder, shuffle_buffer_size=40)[2])
    with pytest.raises(ValueError, match="truncation was"):
        check_same_data_order(settings, open_stream(folder, truncation="left")[2])
    with open(folder / "train" / "0.jsonl", "a") as file:
        file.write('{"src": "a", "tgt": "b"}\n')
    with pytest.raises(ValueError, match="data files was"):
        check_same_data_order(settings, open_stream(folder)[2])


def test_stream_without_max_steps_names_the_key(folder, open_stream):
    with pytest.raises(ValueError, match=r"lazy.*set max_steps"):
        open_stream(folder, max_steps=-1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stream_bad_rows_are_named(num_workers, folder, open_stream, caplog):
    with open(folder / "train" / "1.jsonl", "a") as file:
        file.write('{"src": "no answer"}\n')
    rows, order, _ = open_stream(folder, num_workers=num_workers)
    with pytest.raises(DataError, match=r"1\.jsonl:61:1: missing key"):
        read(rows, order)
    rows, order, _ = open_stream(folder, num_workers=num_workers, bad_rows="drop")
    assert len(sources(read(rows, order))) == 150
    assert rows.stats.dropped == {"missing key": 1}


def test_stream_without_a_valid_row_is_an_error(folder, open_stream):
    for path in (folder / "train").iterdir():
        path.write_text('{"src": "no answer"}\n')
    rows, order, _ = open_stream(folder, bad_rows="drop")
    with pytest.raises(ValueError, match="no valid rows"):
        read(rows, order)
    for path in (folder / "train").iterdir():
        path.write_text("\n")
    rows, order, _ = open_stream(folder)
    with pytest.raises(ValueError, match="no valid rows"):
        read(rows, order)


def test_stream_holds_only_the_windows_of_the_current_step(folder, open_stream):
    """Check steps of 4 rows over windows of 11, so that steps begin in one window and end in the next."""
    rows, order, _ = open_stream(folder, shuffle_buffer_size=11, gradient_accumulation_steps=2)
    held = [len(rows._held) for _ in itertools.islice(order.step_batches(), 150)]
    assert max(held) == 2


def test_stream_windows_know_the_packs_that_complete_a_step(folder, open_stream, monkeypatch):
    """Check `lead`, which keeps the steps of a window even: the packs before it, modulo the packs of a step."""
    planned = []

    class Plan(PackingPlan):
        def packs(self, epoch):
            found = super().packs(epoch)
            planned.append((self.lead, len(found)))
            return found

    monkeypatch.setattr(stream_order, "PackingPlan", Plan)
    rows, order, _ = open_stream(folder, gradient_accumulation_steps=4, **PACKINGS["greedy"])
    steps = read(rows, order)
    before = [sum(count for _, count in planned[:number]) for number in range(len(planned))]
    assert [lead for lead, _ in planned] == [-count % 8 for count in before] and len(set(before)) > 3
    windows = len(planned)
    read(rows, order, 1, 0, 3, steps[2][0].next_cursor)
    assert planned[windows] in planned[:windows], "a resumed window is packed as before"


def test_stream_window_ends_with_its_tokens(folder, open_stream, monkeypatch):
    monkeypatch.setattr(stream_module, "WINDOW_TOKENS", 100)
    rows, _, _ = open_stream(folder)
    windows = list(itertools.islice(rows.windows(), 5))
    assert all(100 <= len(window.arrays.tokens) < 200 for window in windows)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1.0, 1.0, 1.0)])
def test_stream_mixture_has_its_weights_at_any_time(weights, tmp_path, open_stream):
    """Check the shares in numbers of rows, which are within one row of their weights after each window."""
    names = [str(write(tmp_path / name, name, count)) for name, count in (("a", 40), ("b", 90), ("c", 15))]
    probabilities = ",".join(map(str, weights))
    rows, order, settings = open_stream(",".join(names), train_dataset_prob=probabilities, zero_padding=True)
    steps = read(rows, order, 150)
    read_rows = [file.split("/")[-3] for file, _ in sources(steps)]
    for end in (64, 320, len(read_rows) // 32 * 32):
        shares = [read_rows[:end].count(name) / end for name in "abc"]
        np.testing.assert_allclose(shares, np.array(weights) / sum(weights), atol=0.02 if end == 64 else 0.01)
    again, same_order, _ = open_stream(",".join(names), train_dataset_prob=probabilities, zero_padding=True)
    step = steps[83][0]
    position = (step.epoch + step.is_last, 0 if step.is_last else step.index + 1, step.next_cursor)
    assert contents(read(again, same_order, 30, *position)) == contents(steps[84:114])
    with pytest.raises(ValueError, match="train_dataset_prob was"):
        check_same_data_order(settings, open_stream(",".join(names), train_dataset_prob="1,1,2")[2])
