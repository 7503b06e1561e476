"""Test `model.generate` on a padded batch of ids, as in transformers."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.generation.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts([5, 2, 7])


def padded(side: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts padded with zeros, and their mask."""
    ids, mask = np.zeros((3, 7), np.int64), np.zeros((3, 7), np.int64)
    for row, prompt in enumerate(PROMPTS):
        start = 0 if side == "right" else 7 - len(prompt)
        ids[row, start : start + len(prompt)], mask[row, start : start + len(prompt)] = prompt, 1
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_tensor", [paddle.to_tensor, np.asarray])
def test_generate_padded_batch_matches_single_prompts(side: str, as_tensor):
    model = tiny_model("llama_grouped_heads")
    expected = model.generate(PROMPTS, max_new_tokens=4)
    ids, mask = padded(side)
    result = model.generate(input_ids=as_tensor(ids), attention_mask=as_tensor(mask), max_new_tokens=4)
    assert result.shape == [3, 11]
    np.testing.assert_array_equal(result.numpy()[:, :7], ids)
    np.testing.assert_array_equal(result.numpy()[:, 7:], expected)


@pytest.mark.parametrize("pad", [77, None])
def test_generate_pads_rows_that_end_early_with_the_given_token_or_the_end_token(pad):
    model = tiny_model("llama_grouped_heads")
    full = model.generate(PROMPTS, max_new_tokens=4)
    end = full[0][1]
    ended = model.generate(PROMPTS, max_new_tokens=4, eos_token_id=end)
    assert len(ended[0]) < 4
    ids, mask = padded("left")
    options = {"attention_mask": paddle.to_tensor(mask), "max_new_tokens": 4, "eos_token_id": end}
    result = model.generate(paddle.to_tensor(ids), **options, pad_token_id=pad).numpy()[:, 7:]
    width = max(map(len, ended))
    np.testing.assert_array_equal(result, [row + [pad or end] * (width - len(row)) for row in ended])


def test_generate_do_sample_equals_the_sampling_strategy():
    model = tiny_model("llama_grouped_heads")
    options = {"max_new_tokens": 6, "seed": 3, "temperature": 2.0}
    drawn = model.generate(PROMPTS, decode_strategy="sampling", **options)
    assert model.generate(PROMPTS, do_sample=True, **options) == drawn
    assert model.generate(PROMPTS, do_sample=False, **options) == model.generate(PROMPTS, max_new_tokens=6) != drawn


def test_generate_with_conflicting_arguments_raises():
    model, ids = tiny_model("llama_grouped_heads"), paddle.to_tensor([[1, 2, 3]])
    for arguments, message in (
        ({}, "there is no prompt; pass lists of token ids as prompts"),
        ({"prompts": [[1]], "input_ids": ids}, "prompts and input_ids both set the prompt"),
        ({"prompts": [[1]], "attention_mask": ids}, "have no padding"),
        ({"input_ids": ids, "attention_mask": ids[:, 1:]}, "pass both as"),
        ({"input_ids": ids, "do_sample": True, "decode_strategy": "sampling"}, "both choose the strategy"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**arguments, max_new_tokens=1)
