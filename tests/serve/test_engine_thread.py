"""The engine's thread: it finishes what it accepted, and accepts nothing afterwards."""

from __future__ import annotations

import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.serve.engine_thread import Worker
from paddlenlp_ext.serve.errors import ApiError
from tests.generation.engine_answers import Answer, engine_of
from tests.generation.tiny_models import random_prompts, tiny_model


def test_worker_close_finishes_accepted_requests_and_refuses_more():
    model, prompts = tiny_model("llama_grouped_heads"), random_prompts((4, 9, 5))
    worker = Worker(engine_of(model, max_rows=2), max_waiting=3)
    worker.start()
    answers = [Answer(prompt, 12) for prompt in prompts]
    worker.submit([answer.request for answer in answers])
    assert worker.close(60)
    assert [answer.tokens for answer in answers] == generate(model, prompts, max_new_tokens=12)
    with pytest.raises(ApiError, match="the server is stopping") as error:
        worker.submit([answers[0].request])
    assert error.value.status == 503


def test_worker_full_queue_takes_none_of_the_requests():
    worker = Worker(engine_of(tiny_model("llama_grouped_heads"), max_rows=2), max_waiting=2)
    answers = [Answer([1, 2], 3) for _ in range(3)]
    worker.start()
    with pytest.raises(ApiError, match="0 answers are waiting, and the queue has room for 2") as error:
        worker.submit([answer.request for answer in answers])
    assert error.value.status == 429
    assert worker.close(60)
    assert [answer.ended for answer in answers] == [[], [], []]
