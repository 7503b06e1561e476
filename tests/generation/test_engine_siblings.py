"""Requests that share the prefill of their prompt give the same tokens as requests with a prefill each."""

from __future__ import annotations

import itertools

import paddle
import pytest

from paddlenlp_ext.generation.request import STOP
from tests.generation.engine_answers import Answer, engine_of, run
from tests.generation.tiny_models import random_prompts, tiny_model

FAMILIES = ("llama_grouped_heads", "gemma3_sandwich", "lfm2_convolutions", "qwen3_5_gated_delta", "granite_4_mamba2")
PROMPTS = random_prompts((3, 5, 2, 4))
SAMPLED = {"decode_strategy": "sampling", "temperature": 1.5, "seed": 3}


def answers(prompts: list[list[int]], end: tuple[int, ...]) -> list[list[Answer]]:
    return [
        [Answer(prompt, 9, end, row=3 * number + index, **SAMPLED) for index in range(3)]
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_siblings_get_the_tokens_of_single_requests(family):
    """Let groups join a running batch, with prompts in parts, and end at different steps, one at its first token."""
    model, prompts = tiny_model(family), random_prompts((11, 1, 8))
    free = answers(prompts, ())
    run(engine_of(model, max_rows=9), [answer for group in free for answer in group])
    end = (free[0][0].tokens[0], free[1][1].tokens[0], free[2][0].tokens[4])
    single, groups = answers(prompts, end), answers(prompts, end)
    run(engine_of(model, max_rows=2), [answer for group in single for answer in group])
    engine = engine_of(model, max_rows=4, prompt_tokens_per_step=6)
    for first, *others in groups:
        first.request.siblings = [answer.request for answer in others]
        engine.submit(first.request)
        engine.step()
    while engine.step():
        pass
    for alone, grouped in zip(itertools.chain(*single), itertools.chain(*groups), strict=True):
        assert grouped.tokens == alone.tokens and grouped.ended == alone.ended
    assert groups[0][0].tokens == [] and groups[0][0].ended == [STOP]


def test_engine_group_waits_until_the_batch_has_room_for_all_its_siblings():
    """Submit four groups of three with different limits to a batch of seven rows, which has room for two groups."""
    counts = []
    engine = engine_of(tiny_model("llama_grouped_heads"), max_rows=7)
    groups = [[Answer(prompt, limit, row=row) for row in range(3)] for limit, prompt in enumerate(PROMPTS, 4)]
    for first, *others in groups:
        first.request.siblings = [answer.request for answer in others]
        engine.submit(first.request)
    while engine.step():
        counts.append(engine.num_rows)
    assert max(counts) == 6 and all(len(answer.ended) == 1 for group in groups for answer in group)


def test_engine_group_that_exceeds_the_batch_joins_an_empty_batch():
    first, *others = group = answers(random_prompts((4,)), ())[0]
    first.request.siblings = [answer.request for answer in others]
    engine = engine_of(tiny_model("llama_grouped_heads"), max_rows=2)
    run(engine, [first])
    assert all(len(answer.ended) == 1 for answer in group)


def test_engine_siblings_of_a_failed_request_end_with_its_error(monkeypatch):
    model, group = tiny_model("llama_grouped_heads"), answers(random_prompts((4,)), ())[0]
    monkeypatch.setattr(model, "logits", lambda hidden: paddle.full([1, model.config.vocab_size], float("nan")))
    group[0].request.siblings = [answer.request for answer in group[1:]]
    run(engine_of(model, max_rows=3), group[:1])
    assert [type(answer.ended[0]) for answer in group] == [ValueError] * 3


def test_engine_fail_ends_siblings_that_have_not_joined():
    first, *others = answers(random_prompts((4,)), ())[0]
    first.request.siblings = [answer.request for answer in others]
    engine = engine_of(tiny_model("llama_grouped_heads"), max_rows=3)
    engine.submit(first.request)
    engine.fail(RuntimeError("stopped"))
    assert [len(answer.ended) for answer in (first, *others)] == [1, 1, 1]
