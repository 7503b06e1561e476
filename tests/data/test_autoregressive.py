"""Plain text, split and packed: no token lost, none doubled."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddlenlp_ext.data.collate import collate
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.tokenization.truncation import LengthLimits, split_text
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@pytest.mark.parametrize("max_length", range(2, 12))
@pytest.mark.parametrize("truncation", ["right", "left"])
def test_split_text_has_every_token_once_as_input_and_once_as_label(max_length, truncation):
    for num_tokens in range(2, 40):
        tokens = list(range(100, 100 + num_tokens))
        parts = split_text(tokens, LengthLimits(1, max_length, truncation))
        assert all(2 <= len(part) <= max_length for part in parts)
        assert [token for part in parts for token in part[:-1]] == tokens[:-1]
        assert [token for part in parts for token in part[1:]] == tokens[1:]


@pytest.mark.parametrize("packing", ["none", "in_order", "greedy"])
@pytest.mark.parametrize("seed", range(8))
def test_autoregressive_batches_hold_every_token_of_every_text(seed, packing, options, tokenizer, tmp_path):
    """Check texts of random lengths, from a token to many packs, through splitting, packing and collation."""
    generator = np.random.default_rng(seed)
    max_length = int(generator.integers(2, 40))
    texts = ["".join(generator.choice(list("abc üé你"), int(size))) + "." for size in generator.geometric(0.02, 40)]
    (tmp_path / "train.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    dataset = load_dataset(options(tmp_path, autoregressive=True, max_length=max_length), "train", tokenizer)
    plan = PackingPlan(dataset.lengths, batch_size=2, packing=packing, capacity=max_length, seed=seed)
    inputs, labels = {}, {}
    for packs in plan.epoch(0):
        batch = collate([[dataset[index] for index in pack] for pack in packs], pad_to_multiple_of=3)
        start = 0
        for row, length in zip(batch.row_indices, batch.document_lengths[0], strict=False):
            inputs[row] = batch.input_ids[0, start : start + length].tolist()
            labels[row] = batch.labels[0, start : start + length].tolist()
            start += length
        assert (batch.labels[0, start:] == IGNORED_LABEL).all(), "only padding follows the documents"
    encoded = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    rows = range(len(dataset))
    assert sorted(inputs) == list(rows)
    assert [token for row in rows for token in inputs[row]] == [token for ids in encoded for token in ids[:-1]]
    assert [token for row in rows for token in labels[row]] == [token for ids in encoded for token in ids[1:]]
    assert dataset.stats.num_read == dataset.stats.num_untruncated == len(texts)
