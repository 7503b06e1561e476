"""The engine's thread: it finishes what it accepted, and accepts nothing afterwards."""

from __future__ import annotations

import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.serve.engine_thread import EngineStoppedError, EngineThread, QueueFullError
from tests.generation.engine_answers import Answer, engine_of
from tests.generation.tiny_models import random_prompts, tiny_model


def test_engine_thread_close_finishes_accepted_requests_and_refuses_more():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 9, 5))
    thread = EngineThread(engine_of(model, max_rows=2), max_waiting=3)
    thread.start()
    answers = [Answer(prompt, 12) for prompt in prompts]
    thread.submit([answer.request for answer in answers])
    assert thread.close(60)
    assert [answer.tokens for answer in answers] == generate(model, prompts, max_new_tokens=12)
    with pytest.raises(EngineStoppedError, match="the server is stopping"):
        thread.submit([answers[0].request])


def test_engine_thread_full_queue_takes_none_of_the_requests():
    thread = EngineThread(engine_of(tiny_model("llama_grouped_heads"), max_rows=2), max_waiting=2)
    answers = [Answer([1, 2], 3) for _ in range(3)]
    thread.start()
    with pytest.raises(QueueFullError, match="0 answers are waiting, and the queue has room for 2"):
        thread.submit([answer.request for answer in answers])
    assert thread.close(60)
    assert [answer.ended for answer in answers] == [[], [], []]


def test_engine_thread_queue_that_a_client_has_filled_takes_the_requests_of_another_client():
    thread = EngineThread(engine_of(tiny_model("llama_grouped_heads"), max_rows=1), max_waiting=4)
    many, more, other = ([Answer([1, 2], 3).request for _ in range(count)] for count in (4, 1, 2))
    for request in other:
        request.client = "other"
    thread._thread.is_alive = lambda: True  # accept requests, but run none
    thread.submit(many)
    with pytest.raises(QueueFullError, match="4 answers are waiting"):
        thread.submit(more)
    thread.submit(other)
    with pytest.raises(QueueFullError, match="6 answers are waiting"):
        thread.submit(other[:1])
