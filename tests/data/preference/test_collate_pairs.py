"""Collation of preference data: every token of every answer is a target once, in any layout and any packs."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.data.preference.collate_pairs import collate_pairs, mismatched_rows
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.utils.labels import IGNORED_LABEL

NO = IGNORED_LABEL


def make_row(prompt, *answers, index=0, is_desirable=None, share_prompt=True, masks=None):
    masks = masks or [[1] * len(answer) for answer in answers]
    starts = np.cumsum([len(prompt), *map(len, answers[:-1])])
    return TokenizedPair(
        np.array([*prompt, *(token for answer in answers for token in answer)], np.int32),
        np.array([*[0] * len(prompt), *(flag for mask in masks for flag in mask)], bool),
        index,
        tuple(map(int, starts)),
        is_desirable or (True, False)[: len(answers)],
        share_prompt,
    )


PAIR = make_row([1, 2, 3], [10, 11, 12], [20, 21], index=5)
SHORT = make_row([7], [30], [40, 41], index=2)


def test_collate_pairs_computes_the_prompt_once():
    batch = collate_pairs([[PAIR, SHORT]])
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 3, 20, 7, 7, 40]]
    assert batch.labels.tolist() == [[NO, NO, 10, 11, 12, 20, 21, 30, 40, 41]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 0, 1]]
    assert batch.document_lengths == ((2, 3, 2, 1, 2),)
    assert batch.document_parents == ((None, 0, 0, None, None),)
    assert batch.answer_index.tolist() == [[-1, -1, 0, 0, 0, 1, 1, 2, 3, 3]]
    assert batch.is_desirable.tolist() == [True, False, True, False]
    assert batch.answer_lengths.tolist() == [3, 2, 1, 2] and batch.num_answers == 4
    assert batch.row_indices == (5, 2) and batch.reference_logps is None and batch.mismatched is None
    assert batch.answer_index.dtype == batch.labels.dtype == np.int64


def test_collate_pairs_as_separate_rows_repeats_the_prompt():
    separate = make_row([1, 2, 3], [10, 11, 12], [20, 21], share_prompt=False)
    batch = collate_pairs([[separate]])
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 1, 2, 3, 20]]
    assert batch.labels.tolist() == [[NO, NO, 10, 11, 12, NO, NO, 20, 21]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.document_lengths == ((5, 4),) and batch.document_parents is None
    assert batch.answer_index.tolist() == [[-1, -1, 0, 0, 0, -1, -1, 1, 1]]


def test_collate_pairs_of_a_rated_answer_is_one_document():
    batch = collate_pairs([[make_row([1, 2], [10, 11], is_desirable=(False,))]])
    assert batch.input_ids.tolist() == [[1, 2, 10]] and batch.labels.tolist() == [[NO, 10, 11]]
    assert batch.document_lengths == ((3,),) and batch.document_parents is None
    assert batch.is_desirable.tolist() == [False] and batch.num_answers == 1


def test_collate_pairs_with_padding_gives_each_pack_a_batch_row():
    batch = collate_pairs([[PAIR], [SHORT, PAIR]], pad_to_length=12, pad_token_id=99)
    assert batch.document_lengths == ((2, 3, 2, 5), (1, 2, 2, 3, 2, 2))
    assert batch.document_parents == ((None, 0, 0, None), (None, None, None, 2, 2, None))
    assert batch.answer_index[1].tolist() == [2, 3, 3, -1, -1, 4, 4, 4, 5, 5, -1, -1]
    assert batch.input_ids[0, 7:].tolist() == [99] * 5 and (batch.labels[0, 7:] == NO).all()
    assert (batch.num_tokens, batch.num_positions) == (17, 24)


def test_collate_pairs_leaves_context_of_an_answer_out_of_the_loss():
    """Check an answer of several turns: its user message is visible, and no target."""
    batch = collate_pairs([[make_row([1], [10, 50, 11], [20], masks=[[1, 0, 1], [1]])]])
    assert batch.input_ids.tolist() == [[1, 10, 50, 1]] and batch.labels.tolist() == [[10, NO, 11, 20]]
    assert batch.answer_index.tolist() == [[0, -1, 0, 1]] and batch.answer_lengths.tolist() == [2, 1]


def test_collate_pairs_reads_reference_logps_by_row_and_answer():
    reference = np.arange(12, dtype=np.float64).reshape(6, 2)
    rated = make_row([1], [10], index=3, is_desirable=(True,))
    batch = collate_pairs([[PAIR], [rated, SHORT]], reference_logps=reference)
    assert batch.reference_logps.tolist() == [10, 11, 6, 4, 5] and batch.reference_logps.dtype == np.float32


def test_mismatched_rows_pair_each_prompt_with_the_answer_before_it():
    rows = [make_row([n, n], [10 * n, 10 * n + 1], is_desirable=(True,), index=n) for n in (1, 2, 3)]
    batch = collate_pairs([rows[:1], rows[1:]], with_mismatched=True, pad_to_multiple_of=5)
    assert batch.mismatched.input_ids.tolist() == [[1, 1, 30, 2, 2, 10, 3, 3, 20, 0]]
    assert batch.mismatched.labels.tolist() == [[NO, 30, 31, NO, 10, 11, NO, 20, 21, NO]]
    assert batch.mismatched.num_answers == 3 and batch.mismatched.document_parents is None
    assert [row.tokens.tolist() for row in mismatched_rows(rows[:1])] == [[1, 1, 10, 11]]


def test_mismatched_rows_of_pairs_take_both_answers_of_the_pair_before():
    rows = mismatched_rows([PAIR, SHORT])
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 30], [1, 2, 3, 40, 41], [7, 10, 11, 12], [7, 20, 21]]


def random_rows(seed):
    """Return prompts of 1 to 5 tokens, with two answers of 1 to 6 tokens."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, (6, 7, 7), (generator.integers(1, 5), 3))
    return [[generator.integers(1, 1000, size).tolist() for size in row] for row in sizes]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("in_one_pack", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_collate_pairs_makes_every_answer_token_a_target_once(seed, in_one_pack, share_prompt):
    """Check that the documents visible to a position contain its prompt and answer, at consecutive positions."""
    rows, multiple = random_rows(seed), [None, 4][seed % 2]
    encoded = [make_row(*row, index=index, share_prompt=share_prompt) for index, row in enumerate(rows)]
    packs = [encoded] if in_one_pack else [[row] for row in encoded]
    pad_to_length = None if in_one_pack else max(row.length for row in encoded) + 3
    batch = collate_pairs(packs, pad_to_multiple_of=multiple, pad_to_length=pad_to_length)
    assert batch.num_tokens == sum(row.length for row in encoded)
    for answer, expected in enumerate(answer for row in rows for answer in row[1:]):
        assert batch.labels[batch.answer_index == answer].tolist() == expected
    assert (batch.answer_index >= 0).sum() == sum(len(first) + len(second) for _, first, second in rows)
    assert ((batch.labels == NO) == (batch.answer_index < 0)).all()
    for batch_row, lengths in enumerate(batch.document_lengths):
        parents = batch.document_parents[batch_row] if batch.document_parents else [None] * len(lengths)
        starts = np.cumsum([0, *lengths])
        for number, parent in enumerate(parents):
            visible = [number] if parent is None else [parent, number]
            seen = [slice(starts[document], starts[document + 1]) for document in visible]
            positions = np.concatenate([batch.position_ids[batch_row, part] for part in seen])
            assert positions.tolist() == list(range(len(positions)))
            answer = batch.answer_index[batch_row, seen[-1]].max()
            if answer >= 0:
                prompt, *answers = rows[answer // 2]
                inputs = np.concatenate([batch.input_ids[batch_row, part] for part in seen])
                assert inputs.tolist() == [*prompt, *answers[answer % 2][:-1]]


def test_collate_pairs_with_a_pair_too_long_names_its_row():
    with pytest.raises(ValueError, match="rows 5 have 7 positions"):
        collate_pairs([[PAIR]], pad_to_length=6)
