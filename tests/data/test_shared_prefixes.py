"""Rows that share a prefix: documents of a batch, and packs that compute the prefix once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddlenlp_ext.data.collate import build_collate, collate
from paddlenlp_ext.data.packing import PackingPlan, attention_cost
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.data.shared_prefixes import SharedPrefixes
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.training_rows import load_rows
from paddlenlp_ext.utils.labels import IGNORED_LABEL
from tests.common.training import VOCABULARY, PrefixedRows, make_config

NO = IGNORED_LABEL
GREEDY = {"packing": "greedy"}
IN_ORDER = {"packing": "in_order"}
PACKED = {"zero_padding": True, "share_prefix": True}


def row_of(tokens, first_target, index):
    return EncodedRow(np.array(tokens, np.int32), np.arange(len(tokens)) >= first_target, index)


ROWS = [row_of([1, 2, 3, 4, 10], 4, 0), row_of([1, 2, 3, 4, 11, 12], 4, 1), row_of([1, 2, 3, 5, 13], 4, 2)]
OTHER = row_of([7, 8], 1, 3)
PREFIXES = SharedPrefixes(np.array([0, 0, 0, -1]), np.array([3]))


def random_prefixes(seed, num_rows=600, capacity=400):
    """Return lengths and prefixes of random rows; a third of the rows share no prefix."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 200, size=1 + seed % 7)
    groups = np.where(draw.random(num_rows) < 0.33, -1, draw.integers(len(sizes), size=num_rows))
    own = draw.integers(1, 60, size=num_rows)
    return own + np.append(sizes, 0)[groups], SharedPrefixes(groups, sizes), capacity


def positions_of(pack, lengths, prefixes):
    """Return the number of positions of a pack whose rows with one prefix follow each other, row by row."""
    total, before = 0, -1
    for row in pack:
        group = int(prefixes.groups[row])
        total += int(lengths[row]) - (int(prefixes.lengths[group]) if group >= 0 and group == before else 0)
        before = group
    return total


def test_collate_of_joined_rows_computes_the_prefix_once():
    batch = collate([PREFIXES.join([*ROWS, OTHER])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 4, 11, 5, 7]]
    assert batch.labels.tolist() == [[NO, NO, NO, 10, 11, 12, 13, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 3, 0]]
    assert batch.document_lengths == ((3, 1, 2, 1, 1),) and batch.document_parents == ((None, 0, 0, 0, None),)
    assert batch.row_indices == (0, 1, 2, 3) and batch.num_tokens == 8
    assert batch.num_target_tokens == collate([[*ROWS, OTHER]]).num_target_tokens == 5


def test_join_shares_a_prefix_only_among_rows_that_follow_each_other():
    batch = collate([PREFIXES.join([ROWS[0], OTHER, ROWS[1], ROWS[2]])])
    assert batch.document_lengths == ((4, 1, 3, 2, 1),) and batch.document_parents == ((None, None, None, 2, 2),)
    assert PREFIXES.repeated([[0, 3, 1, 2]]).tolist() == [3]
    assert PREFIXES.join([ROWS[0], OTHER]) == [ROWS[0], OTHER]


def test_build_collate_joins_rows_within_a_pack():
    rows = PrefixedRows(6, (40,))
    build = build_collate(rows, make_config("out", **PACKED).data, 0, VOCABULARY)
    batch = build([[0, 1, 2], [3, 4, 5]])
    assert batch.document_parents == ((None, 0, 0, 0, None, 4, 4, 4),)
    assert batch.num_tokens == rows.lengths.sum() - 4 * 40
    plain = build_collate(rows, make_config("out", zero_padding=True).data, 0, VOCABULARY)([[0, 1, 2], [3, 4, 5]])
    assert plain.document_parents is None and plain.num_tokens == rows.lengths.sum()
    padded = build_collate(rows, make_config("out", **PACKED, pad_to_multiple_of=64).data, 0, VOCABULARY)([[0, 1]])
    assert padded.document_parents == ((None, 0, 0, None),) and padded.num_positions == 128


@pytest.mark.parametrize("packing", [IN_ORDER, GREEDY])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_packing_plan_with_prefixes_packs_every_row_once_within_capacity(packing, shuffle, seed):
    lengths, prefixes, capacity = random_prefixes(seed)
    plan = PackingPlan(
        lengths, batch_size=3, capacity=capacity, seed=seed, shuffle=shuffle, prefixes=prefixes, **packing
    )
    for epoch in range(2):
        packs = plan.packs(epoch)
        assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
        counts = [positions_of(pack, lengths, prefixes) for pack in packs]
        assert max(counts) <= capacity and plan.num_positions(packs) == sum(counts)
        unshared = PackingPlan(lengths, batch_size=3, capacity=capacity, seed=seed, shuffle=shuffle, **packing)
        assert len(packs) < len(unshared.packs(epoch))


@pytest.mark.parametrize("packing", [IN_ORDER, GREEDY])
def test_packing_plan_with_prefixes_fills_packs_and_follows_seed_and_epoch(packing):
    lengths, prefixes, capacity = random_prefixes(3, num_rows=3000)
    settings = {"batch_size": 2, "capacity": capacity, "prefixes": prefixes, **packing}
    plan, again = PackingPlan(lengths, seed=1, **settings), PackingPlan(lengths, seed=1, **settings)
    assert again.epoch(2) == plan.epoch(2) and again.epoch(0) == plan.epoch(0)
    assert plan.epoch(0) != plan.epoch(1) != PackingPlan(lengths, seed=2, **settings).epoch(1)
    assert plan.fill(0) > (0.97 if packing == GREEDY else 0.85)


def test_packing_plan_with_few_rows_per_prefix_keeps_them_in_one_pack_at_random_places():
    """Check 400 groups of 4 rows: each is in one pack, and their mean place is the middle of the epoch."""
    groups = np.arange(1600) % 400
    lengths, prefixes = np.full(1600, 70), SharedPrefixes(groups, np.full(400, 50))
    singles = SharedPrefixes(np.append(groups, np.full(4800, -1)), prefixes.lengths)
    plan = PackingPlan(np.append(lengths, np.full(4800, 70)), batch_size=1, capacity=512, prefixes=singles, **IN_ORDER)
    packs = plan.packs(0)
    places = {row: number for number, pack in enumerate(packs) for row in pack}
    found = np.array([places[row] for row in range(1600)]).reshape(4, 400)
    assert (found == found[0]).all()
    assert abs(found[0].mean() / len(packs) - 0.5) < 0.05


def test_packing_plan_cost_counts_the_attention_within_a_prefix_once():
    lengths = np.array([10, 20, 15, 9])
    prefixes = SharedPrefixes(np.array([0, 0, 0, -1]), np.array([8]))
    plan = PackingPlan(lengths, batch_size=1, capacity=64, prefixes=prefixes, **IN_ORDER)
    assert plan.num_positions([[0, 1, 3], [2]]) == 10 + 12 + 9 + 15
    assert plan.cost([[0, 1, 3], [2]]) == 100 + (400 - 64) + 81 + 225
    assert PackingPlan(lengths, batch_size=1, capacity=64, **IN_ORDER).cost([[0, 1], [2]]) == attention_cost(
        [10, 20, 15]
    )


def test_packing_plan_without_rows_or_with_rows_that_share_nothing_is_a_plan():
    nothing = SharedPrefixes(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert PackingPlan([], batch_size=1, capacity=8, prefixes=nothing, **GREEDY).packs(0) == []
    none = SharedPrefixes(np.full(50, -1), np.zeros(0, np.int64))
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    for packing in (IN_ORDER, GREEDY):
        settings = {"batch_size": 1, "capacity": 20, "seed": 4, **packing}
        assert PackingPlan(lengths, **settings, prefixes=none).packs(0) == PackingPlan(lengths, **settings).packs(0)


def test_num_saved_is_close_to_what_an_epoch_saves():
    lengths, prefixes, capacity = random_prefixes(5, num_rows=4000)
    plan = PackingPlan(lengths, batch_size=1, capacity=capacity, prefixes=prefixes, **GREEDY)
    saved = int(lengths.sum()) - plan.num_positions(plan.packs(0))
    assert prefixes.num_saved(lengths, capacity) == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("prob", [None, "0.5,0.5"])
def test_load_rows_finds_the_prefixes_of_training_rows_and_of_mixtures(prob, tmp_path, options, tokenizer):
    for name, shots in (("a", "one two three " * 20), ("b", "red blue green " * 20)):
        rows = [{"src": f"{shots}{number}?", "tgt": "vier"} for number in range(10)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.json").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / name / "dev.json").write_text(json.dumps(rows[0]))
    paths = [str(tmp_path / name) for name in "ab"]
    keys = {"dataset_name_or_path": paths, "train_dataset_prob": prob, "max_length": 1024, "zero_padding": True}
    found = load_rows(options("", **keys, share_prefix=True), "train", tokenizer)
    assert len(found.prefixes.lengths) == 2 and (found.prefixes.lengths > 40).all()
    assert found.prefixes.groups.tolist() == [found.prefixes.groups[0]] * 10 + [found.prefixes.groups[10]] * 10
    order = build_data_order(make_config("out", max_length=1024, zero_padding=True, share_prefix=True), found)
    assert order.plan.num_positions(order.plan.packs(0)) < found.lengths.sum() / 4
    plain = load_rows(options("", **keys), "train", tokenizer)
    assert plain.prefixes is None
    with pytest.raises(ValueError, match="rows were loaded without share_prefix"):
        build_data_order(make_config("out", max_length=1024, zero_padding=True, share_prefix=True), plain)
