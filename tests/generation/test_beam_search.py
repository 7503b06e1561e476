"""Compare beam search with transformers, and in batches with single rows."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.generation.tiny_models import SIZES, golden_model, random_prompts, tiny_model
from tests.golden import DATA
from tests.golden.cases.generate_cases import BEAM_CASES, BEAM_OPTIONS, NUM_NEW, make_prompts

BEAMS = {"decode_strategy": "beam_search", "num_beams": 3}


@pytest.mark.parametrize("case", BEAM_CASES)
def test_beam_search_in_a_batch_matches_transformers(case):
    """Compare rows of one batch, which end at different steps, with transformers' search of each prompt."""
    model, prompts = golden_model(case), make_prompts(case)
    golden = json.loads((DATA / "beam_search.json").read_text())[case]
    for option, settings in BEAM_OPTIONS.items():
        found = generate(model, prompts, max_new_tokens=NUM_NEW, decode_strategy="beam_search", **settings)
        assert found == golden[option], option


def test_beam_search_calls_back_each_token_and_row_once():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 9, 2))
    tokens: dict[int, list[int]] = {number: [] for number in range(3)}
    rows: list[int] = []
    options = {"max_new_tokens": 5, "eos_token_id": [3, 5, 7], "batch_size": 2, **BEAMS}
    options |= {"on_token": lambda row, token: tokens[row].append(token), "on_row": lambda row, _: rows.append(row)}
    found = generate(model, prompts, **options)
    assert [tokens[number] for number in range(3)] == found and sorted(rows) == [0, 1, 2]


def test_beam_search_with_longrope_computes_keys_again_beyond_the_trained_context():
    """Compare rows that cross the trained context with the same search whose cache is filled again at every step."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 9.0], "factor": 4.0}
    settings = {**SIZES, "model_type": "llama", "original_max_position_embeddings": 20, "rope_scaling": rope}
    model, (prompt,) = AutoModelForCausalLM.from_config(settings), random_prompts((17,))
    found = generate(model, [prompt], max_new_tokens=8, **BEAMS)
    again = [*prompt, *found[0][:4]]  # a prompt beyond the trained context has a cache with the long factors only
    assert generate(model, [again], max_new_tokens=4, **BEAMS)[0] == found[0][4:]
