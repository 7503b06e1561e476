"""Token ids and loss mask of turns whose lead is a target only in part."""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.data.templates.turns import EncodedTurn, Lead, RenderedTurn, join_in_arrays, join_turns

LEADS = (Lead("a", is_target=False, is_prompt=False), Lead("b", is_target=True, is_prompt=False))
TURNS = [
    EncodedTurn([1, 2], [5, 6], RenderedTurn("", "", "", "", LEADS), ([3], [4, 4])),
    EncodedTurn([7], [8], RenderedTurn("", "", "", "", LEADS, is_target=False), ([], [9])),
    EncodedTurn([], [10], RenderedTurn("", "", "", "")),
]


def test_join_turns_marks_answers_and_leads_of_target_turns():
    tokens, mask = join_turns(TURNS)
    assert tokens == [1, 2, 3, 4, 4, 5, 6, 7, 9, 8, 10]
    assert mask == [index in (3, 4, 5, 6, 10) for index in range(11)]
    assert sum(mask) == sum(turn.num_targets for turn in TURNS)


def test_join_in_arrays_equals_join_turns():
    for turns in (TURNS, []):
        for found, expected, dtype in zip(join_in_arrays(turns), join_turns(turns), (np.int32, bool), strict=True):
            assert found.dtype == dtype and found.tolist() == expected
