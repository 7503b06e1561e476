"""Answers of one request: their jobs in the engine, and the response that their events become.

Events cross from the engine's thread to the event loop in a queue:

    engine's thread    Choice --send--> queue
    event loop                          queue --> full() or parts()
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import anyio
from starlette.responses import JSONResponse, Response

from paddlenlp_ext.generation import request as generation_request
from paddlenlp_ext.serve.choice_deltas import Event
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.responses import ResponseFormat, usage
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.serve")


class Answers:
    """Answers of one request while the engine generates them; whoever submits them calls `cancel` in the end.

    Args:
        form: form of the response.
        num_prompt_tokens: number of tokens of all prompts.
        timeout: time limit in seconds, from now on.

    Attributes:
        jobs: requests of the engine, one for each answer.
    """

    def __init__(self, form: ResponseFormat, num_prompt_tokens: int, timeout: float) -> None:
        self.jobs: list[generation_request.Request] = []
        self._form, self._num_prompt_tokens = form, num_prompt_tokens
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def send(self, event: Event) -> None:
        """Add an event; called from the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def cancel(self) -> None:
        """Remove the answers that have not ended from the engine."""
        for job in self.jobs:
            job.is_cancelled = True

    async def full(self) -> Response:
        """Return the response when all answers have ended.

        Raises:
            ApiError: an answer failed, or the time limit is exceeded.
        """
        by_choice: list[list[Event]] = [[] for _ in self.jobs]
        async for event in self._events():
            by_choice[event.choice].append(event)
        choices = [self._form.full(choice, own) for choice, own in enumerate(by_choice)]
        num_new = sum(event.num_tokens for own in by_choice for event in own)
        head = {**self._form.head, "object": self._form.kind}
        return JSONResponse({**head, "choices": choices, "usage": usage(self._num_prompt_tokens, num_new)})

    async def parts(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events; an error is the last one before the end."""
        head = {**self._form.head, "object": self._form.part_kind}
        own_usage = {"usage": None} if include_usage else {}
        num_new = 0
        try:
            for choice in range(len(self.jobs)):
                for part in self._form.first_parts(choice):
                    yield _sent_event({**head, "choices": [part], **own_usage})
            async for event in self._events():
                num_new += event.num_tokens
                if not event.is_empty:
                    yield _sent_event({**head, "choices": [self._form.part(event)], **own_usage})
            if include_usage:
                yield _sent_event({**head, "choices": [], "usage": usage(self._num_prompt_tokens, num_new)})
        except ApiError as error:  # the status is already sent
            yield _sent_event(error.body())
        yield b"data: [DONE]\n\n"

    async def _events(self) -> AsyncGenerator[Event, None]:
        num_running = len(self.jobs)
        while num_running:
            try:
                with anyio.fail_after(self._deadline - time.monotonic()):
                    event = await self._queue.get()
            except TimeoutError:
                raise ApiError(503, f"the answer took more than {self._timeout:g} seconds", "timeout") from None
            if isinstance(event.error, ApiError):
                raise event.error
            if event.error is not None:
                logger.error("an answer ends with an error", exc_info=event.error)
                raise ApiError(500, str(event.error), "model_error")
            num_running -= event.finish_reason is not None
            yield event


def _sent_event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
