"""Collation: documents are joined without a gap, labels are shifted, padding is a document of its own."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.data.collate import collate
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.utils.labels import IGNORED_LABEL


def make_row(tokens, loss_mask, index=0):
    return EncodedRow(np.array(tokens, np.int32), np.array(loss_mask, bool), index)


FIRST = make_row([10, 11, 12, 13], [0, 0, 1, 1], 4)
SECOND = make_row([20, 21, 22], [0, 1, 0], 9)
NO = IGNORED_LABEL


def test_collate_several_rows_joins_and_shifts_documents():
    batch = collate([[FIRST, SECOND], [FIRST]])
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 10, 11, 12]]
    assert batch.labels.tolist() == [[NO, 12, 13, 21, NO, NO, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.document_lengths == ((3, 2, 3),)
    assert batch.row_indices == (4, 9, 4)
    assert (batch.num_tokens, batch.num_target_tokens, batch.num_positions) == (8, 5, 8)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == np.int64


def test_collate_two_documents_lets_no_label_cross():
    """Check that the last token of a document is not an input and does not predict the next document."""
    batch = collate([[SECOND, FIRST]])
    assert 22 not in batch.input_ids and 10 not in batch.labels


def test_token_mask_is_false_in_padding():
    padded = collate([[FIRST], [SECOND]], pad_to_length=6)
    assert padded.token_mask.sum(axis=1).tolist() == [len(FIRST.tokens) - 1, len(SECOND.tokens) - 1]
    assert padded.token_mask[:, 0].all() and not padded.token_mask[:, -1].any()
    assert collate([[FIRST, SECOND]]).token_mask.all()


def test_collate_with_pad_to_multiple_of_adds_a_document():
    batch = collate([[FIRST, SECOND]], pad_to_multiple_of=8, pad_token_id=7)
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 7, 7, 7]]
    assert batch.labels[0, 5:].tolist() == [NO] * 3 and batch.position_ids[0, 5:].tolist() == [0, 1, 2]
    assert batch.document_lengths == ((3, 2, 3),)
    assert (batch.num_tokens, batch.num_positions, batch.num_target_tokens) == (5, 8, 3)
    assert collate([[FIRST, SECOND]], pad_to_multiple_of=5).document_lengths == ((3, 2),)


def test_collate_with_pad_to_length_gives_each_pack_a_batch_row():
    batch = collate([[FIRST, SECOND], [SECOND]], pad_to_length=6)
    assert batch.input_ids.shape == (2, 6)
    assert batch.document_lengths == ((3, 2, 1), (2, 4))
    assert batch.labels.tolist() == [[NO, 12, 13, 21, NO, NO], [21, NO, NO, NO, NO, NO]]
    assert all(sum(lengths) == 6 for lengths in batch.document_lengths)
    assert collate([[FIRST]], pad_to_length=6, pad_to_multiple_of=4).input_ids.shape == (1, 8)


def test_collate_with_a_pack_too_long_names_its_rows():
    with pytest.raises(ValueError, match="rows 4, 9 have 5 positions"):
        collate([[FIRST, SECOND]], pad_to_length=4)


@pytest.mark.parametrize("packs", [[], [[]], [[make_row([5], [0])]]])
def test_collate_without_a_prediction_asserts(packs):
    with pytest.raises(AssertionError):
        collate(packs)
