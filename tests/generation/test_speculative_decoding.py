"""Compare speculative decoding with decoding token by token, and drafts with their definition."""

from __future__ import annotations

import pytest

from paddlenlp_ext.generation import speculative_decoding
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.generation.speculative_decoding import propose
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

DRAFTS = {"max_draft_tokens": 4, "max_ngram_size": 3, "batch_size": 1}


@pytest.mark.parametrize(
    ("tokens", "size", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 2, [3, 4]),
        ([1, 2, 3, 1, 2], 2, 9, [3, 1, 2]),  # no more tokens than there are
        ([1, 2, 3, 9, 2, 4, 1, 2], 2, 1, [3]),  # the longer n-gram, although the shorter one is nearer
        ([1, 2, 3, 9, 2, 4, 1, 2], 1, 1, [4]),
        ([5, 1, 5, 2, 5], 1, 1, [2]),  # the latest occurrence
        ([1, 2, 3], 2, 4, []),
        ([7], 2, 4, []),
        ([7, 7], 2, 0, []),
    ],
)
def test_propose_returns_tokens_after_latest_longest_match(tokens, size, count, expected):
    assert propose(tokens, size, count) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_leave_greedy_tokens_unchanged(family, monkeypatch):
    """Draft 0 to 3 right tokens and then a wrong one, so that passes accept none, some and all of their draft."""
    model, prompts = tiny_model(family), random_prompts((21, 5))
    expected = generate(model, prompts, max_new_tokens=24)
    passes = []

    def partly_right(tokens, size, count):
        rest = next(
            new[len(tokens) - len(p) :] for p, new in zip(prompts, expected, strict=True) if tokens[: len(p)] == p
        )
        num_right = len(passes) % 5
        passes.append(tokens)
        return [*rest[:num_right], *(token ^ 1 for token in rest[num_right : num_right + 1])][:count]

    monkeypatch.setattr(speculative_decoding, "propose", partly_right)
    assert generate(model, prompts, max_new_tokens=24, **DRAFTS) == expected
    assert len(passes) < 24, "passes accepted no drafts"


def test_passes_with_drafts_have_a_maximum_length_in_a_model_with_states(monkeypatch):
    """Reject the last token of each draft, so that every pass also runs the accepted tokens of the pass before."""
    model, (prompt,), passes = tiny_model("lfm2_convolutions"), random_prompts((7,)), []
    (expected,) = generate(model, [prompt], max_new_tokens=30)
    real = speculative_decoding.step

    def half_right(tokens, size, count):
        rest = expected[len(tokens) - len(prompt) :]
        return [*rest[:1], *(token ^ 1 for token in rest[1:2])][: max(count, 0)]

    def step(model, tokens_BS, cache):
        passes.append(len(tokens_BS[0]))
        return real(model, tokens_BS, cache)

    monkeypatch.setattr(speculative_decoding, "propose", half_right)
    monkeypatch.setattr(speculative_decoding, "step", step)
    assert generate(model, [prompt], max_new_tokens=30, **DRAFTS) == [expected]
    assert passes[:4] == [3, 5, 5, 3]  # 1 new + 2 drafts, 3 + 2, 5 + 0, 1 + 2


def test_drafts_leave_sampled_tokens_and_ends_unchanged():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((9, 30, 4))
    options = {"max_new_tokens": 40, "decode_strategy": "sampling", "top_k": 2, "repetition_penalty": 0.7, "seed": 3}
    expected = generate(model, prompts, eos_token_id=[3, 5], **options)
    assert generate(model, prompts, eos_token_id=[3, 5], **options, **DRAFTS) == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 9.0], "factor": 4.0},
        {"rope_type": "dynamic", "factor": 8.0},
    ],
)
def test_drafts_do_not_cross_the_trained_context(rope):
    settings = {**SIZES, "model_type": "llama", "max_position_embeddings": 20, "rope_scaling": rope}
    model, prompts = AutoModelForCausalLM.from_config(settings), [[5, 9, 5, 9] * n for n in (2, 5, 6)]
    expected = generate(model, prompts, max_new_tokens=20, batch_size=1)
    assert generate(model, prompts, max_new_tokens=20, **DRAFTS) == expected
