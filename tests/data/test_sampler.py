"""Order of the training data: epochs, steps and resuming."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.data.data_order import DataOrder
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.sampler import build_data_order, check_same_data_order, data_order_settings
from tests.common.training import Rows, make_config


def order_of(num_rows=10, batch_size=2, micro_batches_per_step=2, **options):
    plan = PackingPlan(np.full(num_rows, 5), batch_size=batch_size, seed=1)
    return DataOrder(plan, micro_batches_per_step, **options)


def take(order, count, epoch=0, index=0):
    step_batches = order.step_batches(epoch, index)
    return [next(step_batches) for _ in range(count)]


def test_data_order_every_epoch_reads_every_row_once_and_step_batches_never_span_epochs():
    order = order_of()
    step_batches = take(order, 6)
    assert [(step_batch.epoch, step_batch.index, step_batch.is_last) for step_batch in step_batches] == [
        (0, 0, False), (0, 1, False), (0, 2, True), (1, 0, False), (1, 1, False), (1, 2, True),
    ]  # fmt: skip
    assert [len(step_batch.micro_batches) for step_batch in step_batches] == [2, 2, 1, 2, 2, 1]
    for epoch in (0, 1):
        rows = [row for step_batch in step_batches if step_batch.epoch == epoch for row in step_batch.row_indices]
        assert sorted(rows) == list(range(10))
    assert step_batches[0].row_indices != step_batches[3].row_indices
    assert [step_batch.end_fraction for step_batch in step_batches[:3]] == [0.4, 0.8, 1.0]


def test_data_order_any_position_continues_the_same_order():
    uninterrupted = take(order_of(), 6)
    assert take(order_of(), 4, 0, 2) == uninterrupted[2:]
    assert take(order_of(), 2, 1, 1) == uninterrupted[4:]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"),
    [(1.0, -1, 3), (2.0, -1, 6), (0.5, -1, 2), (1.34, -1, 5), (0.01, -1, 1), (2.0, 4, 4), (1.0, 100, 100)],
)
def test_data_order_total_steps_follow_epochs_and_max_steps(epochs, max_steps, steps):
    assert order_of(num_train_epochs=epochs, max_steps=max_steps).total_steps == steps


def test_data_order_without_options_has_one_epoch():
    assert order_of().total_steps == order_of().num_steps(0) == 3


def test_data_order_packed_epochs_have_the_announced_steps():
    rows = Rows(50, seed=2)
    config = make_config("out", zero_padding=True, greedy_zero_padding=True, gradient_accumulation_steps=3,
                         per_device_train_batch_size=2, num_train_epochs=3.0)  # fmt: skip
    order = build_data_order(config, rows)
    step_batches = take(order, order.total_steps + 1)
    assert (step_batches[-2].epoch, step_batches[-2].is_last) == (2, True)
    assert step_batches[-1].epoch == 3


def test_data_order_empty_split_is_an_error():
    with pytest.raises(ValueError, match="train split is empty"):
        order_of(num_rows=0)


def test_check_same_data_order_changed_order_names_the_keys():
    rows = Rows(6)
    saved = data_order_settings(make_config("out"), rows)
    check_same_data_order(saved, data_order_settings(make_config("elsewhere", learning_rate=1e-5), rows))
    with pytest.raises(ValueError, match=r"continued: seed was 42, now 7; .*batch_size was 4, now 2\. Restore"):
        check_same_data_order(
            saved, data_order_settings(make_config("out", seed=7, per_device_train_batch_size=2), rows)
        )
    with pytest.raises(ValueError, match="dataset fingerprint was"):
        check_same_data_order(saved, data_order_settings(make_config("out"), Rows(6, seed=1)))
    edited = Rows(6)
    edited.rows[3].tokens[2] += 1
    with pytest.raises(ValueError, match="dataset fingerprint was"):
        check_same_data_order(saved, data_order_settings(make_config("out"), edited))
    greedy = data_order_settings(make_config("out", zero_padding=True, greedy_zero_padding=True), rows)
    older = {name: value for name, value in greedy.items() if name != "version of greedy packing"}
    with pytest.raises(ValueError, match=r"version of greedy packing was None, now 2.*ignore_data_skip"):
        check_same_data_order(older, greedy)
    held_out = data_order_settings(make_config("out", dev_ratio=0.1), rows)
    for before, now, message in ((saved, held_out, "None, now 0.1"), (held_out, saved, "0.1, now None")):
        with pytest.raises(ValueError, match=f"dev_ratio was {message}"):
            check_same_data_order(before, now)


def test_check_same_data_order_compares_the_prompts_that_all_ranks_sample_together():
    def settings(num_ranks, accumulated, sampled):
        config = make_config("out", num_generations=4, per_device_train_batch_size=4, steps_per_generation=sampled,
                             gradient_accumulation_steps=accumulated)  # fmt: skip
        return data_order_settings(config, Rows(8), num_ranks)

    check_same_data_order(settings(1, 2, 4), settings(2, 1, 2))
    check_same_data_order(settings(1, 2, None), settings(2, 1, 1))
    with pytest.raises(ValueError, match="steps_per_generation times data ranks was 4, now 8"):
        check_same_data_order(settings(1, 2, 4), settings(2, 1, 4))
