"""Prefixes that rows share: exact, without targets, and chosen where they save most."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.data import find_prefixes as module
from paddlenlp_ext.data.find_prefixes import BLOCK, find_prefixes, prefix_limits
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from tests.common.training import arrays_of

CAPACITY = 2048


def tokens(count, seed):
    return np.random.default_rng(seed).integers(1, 1000, count).astype(np.int32)


def make_rows(*parts, answer=5):
    """Return rows of prompts, each a list of token arrays, with random answers."""
    rows = []
    for index, prompt in enumerate(parts):
        ids = np.concatenate([*prompt, tokens(answer, 10_000 + index)])
        rows.append(EncodedRow(ids, np.arange(len(ids)) >= len(ids) - answer, index))
    return rows


def found_in(rows, capacity=CAPACITY):
    found = find_prefixes([arrays_of(rows)], capacity)
    return found.groups.tolist(), found.lengths.tolist()


def common_length(rows):
    """Return the length of the longest common prefix without a label, token by token."""
    length = min(int(np.argmax(row.loss_mask)) - 1 for row in rows)
    while any(row.tokens[:length].tolist() != rows[0].tokens[:length].tolist() for row in rows):
        length -= 1
    return length


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 300, 517])
def test_find_prefixes_of_few_shot_rows_is_their_exact_common_prefix(length):
    shots = tokens(length, 1)
    rows = make_rows(*([shots, [index], tokens(20, index)] for index in range(1, 30)))
    assert found_in(rows) == ([0] * 29, [length])


def test_find_prefixes_shorter_than_a_block_is_not_shared():
    assert found_in(make_rows(*([tokens(BLOCK - 1, 1), [index]] for index in range(1, 9)))) == ([-1] * 8, [])


def test_find_prefixes_ends_before_the_first_position_with_a_label():
    """Check rows with equal prompts of 50 tokens: the last token predicts the answer, and remains in each row."""
    rows = make_rows(*[[tokens(50, 1)]] * 4)
    assert found_in(rows) == ([0] * 4, [49])
    identical = [EncodedRow(rows[0].tokens, rows[0].loss_mask, index) for index in range(3)]
    assert found_in(identical) == ([0] * 3, [49])


def test_find_prefixes_ends_before_the_targets_of_an_earlier_turn():
    chat = np.concatenate([tokens(60, 1), tokens(60, 2)])
    rows = make_rows(*([chat, [index]] for index in range(1, 9)))
    for row in rows:
        row.loss_mask[70:80] = True
    assert found_in(rows) == ([0] * 8, [69])


def test_find_prefixes_leaves_rows_without_targets_alone():
    rows = make_rows(*([tokens(60, 1), [index]] for index in range(1, 5)))
    rows[1].loss_mask[:] = False
    rows[-1].loss_mask[:] = False
    assert prefix_limits(arrays_of(rows)).tolist() == [60, 0, 60, 0]
    assert found_in(rows) == ([0, -1, 0, -1], [60])


def test_find_prefixes_takes_the_examples_of_each_task_and_the_system_prompt_of_other_rows():
    system, tasks = tokens(40, 1), [tokens(300, seed) for seed in (2, 3)]
    alone = [[tokens(90, seed)] for seed in (4, 5)]
    rows = make_rows(
        *([system, tasks[index % 2], [index], tokens(10, index)] for index in range(1, 21)),
        *([system, [index], tokens(60, 100 + index)] for index in range(900, 912)),
        *alone,
    )
    groups, lengths = found_in(rows)
    assert groups[:20:2] == [groups[0]] * 10 and groups[1:20:2] == [groups[1]] * 10
    assert len({*groups[:2], groups[20]}) == 3 and groups[20:] == [groups[20]] * 12 + [-1, -1]
    assert [lengths[groups[index]] for index in (0, 1, 20)] == [340, 340, 40]


def test_find_prefixes_of_a_long_system_prompt_ignores_short_prefixes_of_pairs():
    """Check that 30 rows share 400 tokens: two groups of 15 rows with 410 tokens would need a second copy."""
    system = tokens(400, 1)
    rows = make_rows(*([system, tokens(30, 2 + index % 2), [index]] for index in range(1, 31)), answer=2)
    assert found_in(rows)[1] == [430, 430]
    rows = make_rows(*([system, tokens(30, 2 + index // 2), [index]] for index in range(2, 32)), answer=2)
    assert found_in(rows) == ([0] * 30, [400])


def test_find_prefixes_of_hash_collisions_compares_tokens(monkeypatch):
    monkeypatch.setattr(module, "_hash", lambda hashes, blocks: hashes)
    assert found_in(make_rows(*([tokens(50, seed)] for seed in range(6)))) == ([-1] * 6, [])
    assert found_in(make_rows(*([tokens(50, 1), [index]] for index in range(1, 7)))) == ([0] * 6, [50])


def test_find_prefixes_of_several_datasets_numbers_their_prefixes():
    parts = [arrays_of(make_rows(*([tokens(size, 1), [index]] for index in range(1, 4)))) for size in (40, 20, 50)]
    found = find_prefixes(parts, CAPACITY)
    assert found.groups.tolist() == [0, 0, 0, -1, -1, -1, 1, 1, 1] and found.lengths.tolist() == [40, 50]
    assert found.describe() == "6 of 9 rows share 2 prefixes of 40 to 50 tokens"


@pytest.mark.parametrize("seed", range(12))
def test_find_prefixes_of_random_trees_are_common_prefixes(seed, monkeypatch):
    """Check rows of a random tree of turns, in pieces of seven rows: every group has its longest common prefix."""
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 7)
    draw = np.random.default_rng(seed)
    prompts = [[tokens(int(draw.integers(1, 80)), seed)]]
    while len(prompts) < 60:
        parent = prompts[int(draw.integers(len(prompts)))]
        prompts.append([*parent, tokens(int(draw.integers(1, 50)), int(draw.integers(1 << 30)))])
    rows = make_rows(*prompts, answer=int(draw.integers(1, 9)))
    capacity = int(max(row.length for row in rows) * draw.uniform(1, 3))
    found = find_prefixes([arrays_of(rows)], capacity)
    assert len(found.lengths) and (found.lengths >= BLOCK).all()
    for group, length in enumerate(found.lengths.tolist()):
        members = [rows[index] for index in np.flatnonzero(found.groups == group)]
        assert len(members) > 1 and common_length(members) == length
    assert found.num_saved(np.array([row.length for row in rows]), capacity) > 0
