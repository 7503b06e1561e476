"""Shares of the engine's time of clients with many and few requests."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from paddlenlp_ext.generation import continuous_batching, request
from paddlenlp_ext.generation.client_shares import TimeShares
from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.generation.generate import generate
from tests.generation.engine_answers import Answer, engine_of, run
from tests.generation.tiny_models import random_prompts, tiny_model

MODEL = "llama_grouped_heads"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Clock that advances by a second with each call, so that the shares do not depend on the machine."""
    monkeypatch.setattr(continuous_batching.time, "perf_counter", itertools.count().__next__)


def answers_of(client: str, prompts, limit: int) -> list[Answer]:
    answers = [Answer(prompt, limit) for prompt in prompts]
    for answer in answers:
        answer.request.client = client
    return answers


def submit(engine: Engine, answers: list[Answer]) -> None:
    for answer in answers:
        engine.submit(answer.request)


def test_shares_of_clients_fall_with_the_root_of_their_requests():
    shares, steps = TimeShares(), Counter[str]()
    counts = {"many": 16, "few": 1}
    for _ in range(100):
        client = shares.choose(counts)
        shares.charge(client, 1.0, counts[client])
        steps[client] += 1
    assert steps == {"few": 80, "many": 20}


def test_client_that_arrives_late_does_not_catch_up_with_the_time_of_others():
    shares = TimeShares()
    for _ in range(50):
        shares.charge(shares.choose({"a": 1}), 1.0, 1)
    found = []
    for _ in range(6):
        found.append(shares.choose({"a": 1, "b": 1}))
        shares.charge(found[-1], 1.0, 1)
    assert found == ["a", "b"] * 3


def test_request_prefill_load_counts_a_long_prompt_and_its_logprobs():
    def load(length: int, **options: int) -> int:
        return Answer([1] * length, 1, **options).request.prefill_load

    assert [load(1), load(1024), load(1025), load(4096)] == [1, 1, 2, 4]
    assert [load(1, num_top=0), load(128, num_top=0), load(129, num_top=0)] == [1, 1, 2]


def test_engine_prefill_of_a_long_prompt_leaves_most_steps_to_a_client_with_a_short_prompt(monkeypatch):
    """The long prompt has a load of 25; with a load of 1, it would be prefilled in 9 steps after the short answer."""
    monkeypatch.setattr(request, "_COST_OF_SHORT_PROMPT", 8)
    model, (long, short) = tiny_model(MODEL), random_prompts((200, 5))
    engine = engine_of(model, max_rows=4, prompt_tokens_per_step=8)
    (slow,), (quick,) = answers_of("long", [long], 12), answers_of("short", [short], 60)
    submit(engine, [slow])
    engine.step()
    submit(engine, [quick])
    while not quick.ended:
        engine.step()
    num_steps = 0
    while not slow.tokens:
        engine.step()
        num_steps += 1
    assert num_steps >= 17
    while not slow.ended:
        engine.step()
    assert slow.tokens == generate(model, [long], max_new_tokens=12)[0]


def test_engine_request_of_another_client_joins_a_full_batch_and_ends_before_the_many():
    """Fill batch and queue with long prompts of a client; then submit a short request of another one."""
    model, prompts = tiny_model(MODEL), random_prompts((40, 33, 35, 38, 31, 36, 5))
    expected = generate(model, prompts, max_new_tokens=12)
    engine = engine_of(model, max_rows=3, prompt_tokens_per_step=8)
    many = answers_of("many", prompts[:6], 12)
    submit(engine, many)
    while engine.num_rows < 3:
        engine.step()
    (few,) = answers_of("few", prompts[6:], 12)
    submit(engine, [few])
    most = num_steps = 0
    while not few.ended:
        engine.step()
        num_steps, most = num_steps + 1, max(most, engine.num_rows)
    assert most == 4 and num_steps <= 20
    assert sum(bool(answer.ended) for answer in many) <= 1
    while engine.step():
        pass
    assert [answer.tokens for answer in (*many, few)] == expected


def test_engine_interleaves_the_prompts_of_clients_without_changing_tokens():
    """Prefill prompts of three clients in turns, so that they are completed in another order than they began."""
    model, lengths = tiny_model(MODEL), (60, 9, 50, 12, 55, 7)
    prompts = random_prompts(lengths)
    expected = generate(model, prompts, max_new_tokens=9)
    engine = engine_of(model, max_rows=6, prompt_tokens_per_step=16)
    answers = [answers_of("abc"[index % 3], [prompt], 9)[0] for index, prompt in enumerate(prompts)]
    run(engine, answers, steps_between=1)
    assert [answer.tokens for answer in answers] == expected


def test_engine_prompt_that_is_cancelled_between_its_parts_leaves_the_prompts_of_other_clients():
    model, prompts = tiny_model(MODEL), random_prompts((60, 50, 20))
    expected = generate(model, prompts, max_new_tokens=6)
    engine = engine_of(model, max_rows=6, prompt_tokens_per_step=16)
    answers = [answers_of(client, [prompt], 6)[0] for client, prompt in zip("abc", prompts, strict=True)]
    submit(engine, answers)
    for _ in range(4):
        engine.step()
    answers[0].request.is_cancelled = True
    while engine.step():
        pass
    assert [answer.tokens for answer in answers[1:]] == expected[1:] and not answers[0].ended
    assert engine.num_rows == engine.num_waiting == 0


@pytest.mark.parametrize(("num_others", "most"), [(0, 4), (1, 1)], ids=["one client", "two clients"])
def test_engine_short_prompts_of_a_client_are_spread_over_its_steps(num_others, most):
    model, prompts = tiny_model(MODEL), random_prompts((1,) * 9)
    engine = engine_of(model, max_rows=9, prompt_tokens_per_step=64)
    submit(engine, answers_of("few", prompts[:num_others], 60))
    engine.step()
    submit(engine, answers_of("many", prompts[num_others:], 60))
    num_rows = [engine.num_rows]
    while engine.num_waiting:
        engine.step()
        num_rows.append(engine.num_rows)
    assert max(after - before for before, after in itertools.pairwise(num_rows)) == most


def test_engine_requests_of_two_clients_end_before_the_many_of_another_one():
    model, prompts = tiny_model(MODEL), random_prompts((5,) * 10)
    engine = engine_of(model, max_rows=2)
    submit(engine, answers_of("many", prompts[:8], 3))
    engine.step()
    others = [answers_of(client, prompts[8:9], 3)[0] for client in ("b", "c")]
    submit(engine, others)
    while not all(answer.ended for answer in others):
        assert engine.step()
    assert engine.num_waiting_by_client["many"] >= 4
