"""Continuous batching: every request gets the tokens of `generate`, whenever it joins and whoever else is there."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.generation.logits_processors import LogitAdjustments
from paddlenlp_ext.generation.request import LENGTH, STOP
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.generation.engine_answers import Answer, engine_of, run
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

LENGTHS = (5, 1, 17, 9)
NUM_NEW = 11


def test_engine_num_waiting_leaves_out_cancelled_requests():
    engine, (first, second) = (
        engine_of(tiny_model(next(iter(FAMILIES))), max_rows=1),
        (Answer([1, 2], 3) for _ in range(2)),
    )
    for answer in (first, second):
        engine.submit(answer.request)
    first.request.is_cancelled = True
    assert engine.num_waiting == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_requests_that_join_and_leave_equal_generate(family):
    """Let rows join a running batch of three, with prompts in parts of 7 tokens, and leave at different steps."""
    model, prompts = tiny_model(family), random_prompts(LENGTHS)
    free = generate(model, prompts, max_new_tokens=NUM_NEW, batch_size=len(prompts))
    end, limits = [free[2][7]], range(NUM_NEW, NUM_NEW - len(prompts), -1)
    expected = [
        list(itertools.takewhile(lambda token: token not in end, tokens[:limit]))
        for tokens, limit in zip(free, limits, strict=True)
    ]
    assert len({len(tokens) for tokens in expected}) >= 3, "rows end at the same step"
    answers = [Answer(prompt, limit, end) for prompt, limit in zip(prompts, limits, strict=True)]
    run(engine_of(model, max_rows=3, prompt_tokens_per_step=7), answers, steps_between=2)
    assert [answer.tokens for answer in answers] == expected
    reasons = [[LENGTH if len(row) == limit else STOP] for row, limit in zip(expected, limits, strict=True)]
    assert [answer.ended for answer in answers] == reasons


def test_engine_draws_are_those_of_generate():
    """Mix greedy rows with samples of different options and seeds in one batch."""
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 9, 9, 6))
    options: list[dict[str, Any]] = [
        {},
        {"decode_strategy": "sampling", "temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"decode_strategy": "sampling", "top_k": 20, "seed": 4, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5},
    ]
    pairs = zip(prompts, options, strict=True)
    expected = [generate(model, [prompt], max_new_tokens=12, first_row=2, **option)[0] for prompt, option in pairs]
    answers = [Answer(prompt, 12, row=2, **option) for prompt, option in zip(prompts, options, strict=True)]
    run(engine_of(model, max_rows=4), answers, steps_between=1)
    assert [answer.tokens for answer in answers] == expected


def test_engine_greedy_row_with_min_new_tokens_equals_generate():
    """Test a row whose most likely first token would end it."""
    model, prompt = tiny_model("llama_grouped_heads"), random_prompts((4,))[0]
    ((end, *_),) = generate(model, [prompt], max_new_tokens=1)
    (expected,) = generate(model, [prompt], max_new_tokens=6, min_new_tokens=3, eos_token_id=end)
    answer = Answer(prompt, 6, [end], min_new_tokens=3)
    run(engine_of(model, max_rows=1), [answer])
    assert answer.tokens == expected and len(expected) >= 3


def test_engine_runs_other_rows_between_parts_of_a_long_prompt():
    model = tiny_model("llama_grouped_heads")
    short, long = Answer(random_prompts((3,))[0], 30), Answer(random_prompts((50,))[0], 2)
    engine = engine_of(model, max_rows=2, prompt_tokens_per_step=8)
    engine.submit(short.request)
    engine.step()
    engine.submit(long.request)
    counts = []
    while not long.tokens:
        engine.step()
        counts.append(len(short.tokens))
    assert len(counts) == 7 and set(np.diff(counts)) == {1}


def test_engine_prefill_of_a_long_prompt_leaves_the_cache_of_other_rows_in_place():
    """Decode a row beside a prompt that ends without a new token; the keys of the decoded row must not move."""
    model = tiny_model("llama_grouped_heads")
    short, long = Answer([1, 2, 3], 30), Answer(random_prompts((600,))[0], 0, num_top=0)
    engine = engine_of(model, max_rows=2, prompt_tokens_per_step=200)
    engine.submit(short.request)
    engine.step()
    (batch,) = engine._batches.values()
    keys = batch.cache.layers[0].stored
    engine.submit(long.request)
    while not long.ended:
        engine.step()
    assert batch.cache.layers[0].stored is keys and short.ended == []


def test_engine_logprobs_equal_a_direct_forward_pass():
    """Compare prompt and new tokens, over several parts of a prompt, with the model's log-softmax."""
    model, prompt = tiny_model("gemma2_softcaps"), random_prompts((19,))[0]
    answers = [Answer(prompt, 4, num_top=3), Answer(prompt, 0, num_top=0), Answer([7], 1, num_top=2)]
    run(engine_of(model, max_rows=3, prompt_tokens_per_step=8), answers)
    scored, only_prompt, single = answers
    sequence = prompt + scored.tokens
    with paddle.no_grad():
        log_softmax_SV = paddle.nn.functional.log_softmax(model(paddle.to_tensor([sequence]))[0], axis=-1).numpy()
    found = [*(scored.prompt_logprobs or []), *scored.logprobs]
    assert [each.token for each in found] == sequence[1:]
    for position, each in enumerate(found):
        line = log_softmax_SV[position]
        np.testing.assert_allclose(each.logprob, line[each.token], rtol=1e-4, atol=1e-5)
        best = np.argsort(-line)[:3]
        assert [token for token, _ in each.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in each.top], line[best], rtol=1e-4, atol=1e-5)
    assert only_prompt.tokens == [] and only_prompt.ended == [LENGTH]
    np.testing.assert_allclose(
        [each.logprob for each in only_prompt.prompt_logprobs or []],
        [each.logprob for each in found[:18]],
        rtol=1e-5,
        atol=1e-5,
    )
    assert {each.top for each in only_prompt.prompt_logprobs or []} == {()}
    assert single.prompt_logprobs == [] and len(single.logprobs[0].top) == 2


def test_engine_rows_beyond_the_trained_context_do_not_change_others():
    """Compare rows with other rotary frequencies than their neighbours' with rows alone: dynamic RoPE and LongRoPE."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 9.0], "factor": 4.0}
    for settings in (
        {"max_position_embeddings": 20, "rope_scaling": dynamic},
        {"original_max_position_embeddings": 20, "rope_scaling": long},
    ):
        model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama", **settings})
        prompts = random_prompts((17, 45, 5, 20, 23))
        expected = generate(model, prompts, max_new_tokens=8, batch_size=1)
        answers = [Answer(prompt, 8) for prompt in prompts]
        run(engine_of(model, max_rows=5, prompt_tokens_per_step=8), answers, steps_between=1)
        assert [answer.tokens for answer in answers] == expected


def test_engine_request_ends_when_its_callback_says_so_or_fails():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 6, 5))
    expected = generate(model, prompts, max_new_tokens=9)
    stopped, failing, other = (Answer(prompt, 9) for prompt in prompts)
    stopped.stop_after = 3
    problem = RuntimeError("no text")

    def on_token(token, logprob):
        raise problem

    failing.request.on_token = on_token
    run(engine_of(model, max_rows=3), [stopped, failing, other])
    assert (stopped.tokens, stopped.ended) == (expected[0][:3], [STOP])
    assert failing.ended == [problem]
    assert other.tokens == expected[2]


def test_engine_cancelled_requests_leave_without_a_call():
    """Cancel a waiting request, one with an incomplete prompt, and one that decodes."""
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 40, 5, 6))
    decoding, incomplete, other, waiting = (Answer(prompt, 12) for prompt in prompts)
    engine = engine_of(model, max_rows=3, prompt_tokens_per_step=5)
    engine.submit(other.request)
    engine.step()
    for answer in (decoding, incomplete, waiting):
        engine.submit(answer.request)
    engine.step()
    assert engine.num_rows == 2 or engine.num_rows == 3
    for answer in (decoding, incomplete, waiting):
        answer.request.is_cancelled = True
    seen = len(decoding.tokens)
    while engine.step():
        pass
    assert other.tokens == generate(model, [prompts[2]], max_new_tokens=12)[0]
    assert len(decoding.tokens) == seen
    assert [answer.ended for answer in (decoding, incomplete, waiting)] == [[], [], []]


def test_engine_nan_in_one_row_ends_this_row_only():
    """Give one token an embedding of NaN, and reuse its row for another request."""
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama"})
    weight = model.model.embed_tokens.weight
    prompts = [[1, 2, 3], [4, 50, 6], [7, 8]]
    expected = generate(model, [prompts[0], prompts[2]], max_new_tokens=6)
    assert all(50 not in row for row in expected)
    values = weight.numpy()
    values[50] = np.nan
    weight.set_value(values)
    answers = [Answer(prompt, 6) for prompt in prompts]
    run(engine_of(model, max_rows=2), answers)
    assert "all logits of a row are NaN" in str(answers[1].ended[0])
    assert [answers[0].tokens, answers[2].tokens] == expected


def test_engine_without_requests_holds_no_keys():
    engine, answer = engine_of(tiny_model("llama_grouped_heads"), max_rows=1), Answer([1, 2], 3)
    engine.submit(answer.request)
    engine.step()
    (batch,) = engine._batches.values()
    stored = [weakref.ref(tensor) for layer in batch.cache.layers.values() for tensor in layer.stored or ()]
    assert len(stored) == 4
    run(engine, [])
    assert answer.ended == [LENGTH] and not any(tensor() is not None for tensor in stored)


def test_engine_fail_ends_every_request_and_leaves_it_usable():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 40, 5))
    answers = [Answer(prompt, 12) for prompt in prompts]
    engine = engine_of(model, max_rows=2, prompt_tokens_per_step=5)
    for answer in answers:
        engine.submit(answer.request)
    engine.step()
    error = RuntimeError("out of memory")
    engine.fail(error)
    assert [answer.ended for answer in answers] == [[error]] * 3
    again = Answer(prompts[0], 12)
    run(engine, [again])
    assert again.tokens == generate(model, [prompts[0]], max_new_tokens=12)[0]


def test_engine_logit_bias_excludes_a_token():
    model, prompt = tiny_model("llama_grouped_heads"), random_prompts((4,))[0]
    first = generate(model, [prompt], max_new_tokens=1)[0][0]
    answer = Answer(prompt, 1, adjustments=LogitAdjustments(logit_bias={first: -100.0, 5: 200.0}))
    run(engine_of(model, max_rows=1), [answer])
    assert answer.tokens == [5]
