"""Compare generation with plain decoding and with transformers; test batching, limits and callbacks."""

from __future__ import annotations

import json

import paddle
import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.generation.tiny_models import (
    FAMILIES,
    SIZES,
    golden_model,
    greedy_without_cache,
    random_prompts,
    tiny_model,
)
from tests.golden import DATA
from tests.golden.cases.generate_cases import CASES, NUM_NEW, OPTIONS, make_prompts

LENGTHS = (5, 1, 17, 40, 9, 2, 23)
END = (3, 5, 7)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_generate_matches_transformers(case, option):
    """Compare one batch of all prompts with transformers' continuation of each prompt separately."""
    model = golden_model(case)
    expected = json.loads((DATA / "continuations.json").read_text())[case][option]
    assert {len(tokens) for tokens in expected} == {NUM_NEW}
    assert generate(model, make_prompts(case), max_new_tokens=NUM_NEW, **OPTIONS[option]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_greedy_in_batches_equals_plain_decoding(family):
    """Test rows shorter and longer than the window of 8, of which some end early at one of several end tokens."""
    model, prompts = tiny_model(family), random_prompts(LENGTHS)
    free = [greedy_without_cache(model, prompt, 24) for prompt in prompts]
    end = [free[0][2], free[2][9]]
    expected = [greedy_without_cache(model, prompt, 24, end) for prompt in prompts]
    assert len({len(tokens) for tokens in expected}) >= 3, "all rows end at the same step"
    assert generate(model, prompts, max_new_tokens=24, eos_token_id=end, batch_size=4) == expected


@pytest.mark.parametrize("strategy", ["greedy_search", "sampling"])
def test_generate_nan_logits_raise(strategy):
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama"})
    weight = model.parameters()[3]
    weight.set_value(paddle.full(weight.shape, float("nan")))
    with pytest.raises(ValueError, match="all logits of a row are NaN; the model's weights are damaged"):
        generate(model, random_prompts((5, 1)), max_new_tokens=4, decode_strategy=strategy)


def test_generate_dynamic_rope_uses_whole_prompt_length():
    """Compare the first new token far beyond the trained context with logits computed without a cache."""
    rope = {"rope_type": "dynamic", "factor": 8.0}
    settings = {**SIZES, "model_type": "llama", "max_position_embeddings": 16, "rope_scaling": rope}
    model, prompts = AutoModelForCausalLM.from_config(settings), random_prompts((1500, 1300, 1100))
    expected = [greedy_without_cache(model, prompt, 1) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=1, batch_size=1) == expected


def test_generate_with_longrope_computes_keys_again_beyond_the_trained_context():
    """Compare rows that grow beyond the trained context, or start there, with decoding without a cache."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 9.0], "factor": 4.0}
    settings = {**SIZES, "model_type": "llama", "original_max_position_embeddings": 20, "rope_scaling": rope}
    model, prompts = AutoModelForCausalLM.from_config(settings), random_prompts((17, 20, 23))
    expected = [greedy_without_cache(model, prompt, 8) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=8, batch_size=1) == expected


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_generate_sampling_is_independent_of_batch(batch_size):
    """Check that samples depend on the row number and the seed, and not on the batch."""
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts(LENGTHS)
    options = {"max_new_tokens": 12, "decode_strategy": "sampling", "eos_token_id": list(END)}
    options |= {"top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2}
    reference = generate(model, prompts, seed=7, batch_size=2, **options)
    assert generate(model, prompts, seed=7, batch_size=batch_size, **options) == reference
    assert generate(model, prompts, seed=8, batch_size=batch_size, **options) != reference
    assert len(set(map(tuple, reference))) == len(reference)


def test_generate_sampling_top_1_is_greedy():
    model, prompts = tiny_model("qwen3_qk_norm"), random_prompts((4, 6))
    sampled = generate(model, prompts, max_new_tokens=8, decode_strategy="sampling", top_k=1)
    assert sampled == generate(model, prompts, max_new_tokens=8)
    assert sampled == generate(model, prompts, max_new_tokens=8, decode_strategy="sampling", top_p=0.0)


def test_generate_sampling_takes_any_token_by_default():
    model, prompts = tiny_model("qwen3_qk_norm"), random_prompts((4,))
    drawn = [generate(model, prompts, max_new_tokens=8, decode_strategy="sampling", seed=seed)[0] for seed in range(4)]
    assert len(set(map(tuple, drawn))) == 4
    assert generate(model, prompts, max_new_tokens=8, decode_strategy="sampling") == [drawn[0]]  # the default seed is 0


def test_generate_repetition_penalty_breaks_greedy_loop():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4,))
    tokens = generate(model, prompts, max_new_tokens=60, repetition_penalty=1000.0)[0]
    assert len(set(tokens)) == 60 and not set(tokens) & set(prompts[0])
    assert len(set(generate(model, prompts, max_new_tokens=60)[0])) < 60


@pytest.mark.parametrize("strategy", ["greedy_search", "sampling"])
def test_generate_min_new_tokens_delays_end(strategy):
    """Compare a row with an end token among its first tokens with the same row without that token's logit."""
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((6, 3))
    end = [row[1] for row in generate(model, prompts, max_new_tokens=4)]
    options = {"max_new_tokens": 12, "decode_strategy": strategy, "top_k": 1, "eos_token_id": end}
    rows = generate(model, prompts, min_new_tokens=7, **options)
    assert all(len(row) >= 7 and not set(row) & set(end) for row in rows)
    short = generate(model, prompts, **options)
    assert [row[: len(first)] for row, first in zip(rows, short, strict=True)] == short and len(short[0]) < 2


def test_generate_omits_end_token_and_respects_limit():
    model, prompt = tiny_model("llama_grouped_heads"), random_prompts((6,))
    free = generate(model, prompt, max_new_tokens=10)[0]
    assert len(free) == 10
    end = free[4]
    assert generate(model, prompt, max_new_tokens=10, eos_token_id=end)[0] == free[: free.index(end)]


def test_generate_max_total_length_includes_prompt():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((6, 3))
    assert [len(row) for row in generate(model, prompts, max_new_tokens=10, max_total_length=9)] == [3, 6]
    with pytest.raises(ValueError, match="prompt 0 has 6 tokens, but max_total_length 6 leaves no room for new tokens"):
        generate(model, prompts, max_new_tokens=10, max_total_length=6)


def test_generate_callbacks_get_each_token_and_row_once():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts(LENGTHS)
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    rows: dict[int, list[int]] = {}

    def on_row(number: int, generated: list[int]) -> None:
        assert number not in rows
        rows[number] = list(generated)

    result = generate(
        model,
        prompts,
        max_new_tokens=15,
        eos_token_id=list(END),
        batch_size=3,
        on_token=lambda row, token: tokens[row].append(token),
        on_row=on_row,
    )
    assert [tokens[number] for number in range(len(prompts))] == result == [rows[n] for n in range(len(prompts))]


def test_generate_restores_modes_and_gradients():
    model = tiny_model("llama_grouped_heads")
    model.train()
    model.model.norm.eval()
    seen = []

    def state() -> tuple[bool, bool]:
        return model.training, paddle.is_grad_enabled()

    generate(model, [[1]], max_new_tokens=2, on_token=lambda *_: seen.append(state()))
    assert seen == [(False, False)] * 2
    assert model.training and model.model.layers.training and not model.model.norm.training
    assert paddle.is_grad_enabled()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_strategy": "beam_search"}, "beam_search with num_beams 1: beam_search needs 2 or more beams"),
        ({"num_beams": 4}, "greedy_search with num_beams 4: beam_search needs 2 or more beams, and other strategies"),
        ({"length_penalty": 0.5}, "length_penalty 0.5 has no effect with decode_strategy greedy_search"),
        ({"decode_strategy": "beam_search", "num_beams": 2, "max_draft_tokens": 1}, "beam_search cannot use drafts"),
        ({"max_draft_tokens": 2}, "batch_size 8: speculative decoding runs one row at a time; set batch_size to 1"),
        ({"max_ngram_size": 0}, "max_ngram_size is 0; it must be at least 1"),
        ({"min_new_tokens": 2}, "min_new_tokens is 2; it must be from 0 to max_new_tokens"),
        ({"decode_strategy": "greedy"}, "did you mean 'greedy_search'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be from 0 to 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_generate_invalid_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_model("llama_grouped_heads"), [[1]], **{"max_new_tokens": 1, **options})


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "prompt 1 is empty"), ([4, 97], "prompt 1 has token ids from 4 to 97")]
)
def test_generate_invalid_prompt_is_named(prompt, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_model("llama_grouped_heads"), [[1], prompt], max_new_tokens=1)


def test_generate_without_prompts_returns_no_rows():
    assert generate(tiny_model("llama_grouped_heads"), [], max_new_tokens=1) == []
