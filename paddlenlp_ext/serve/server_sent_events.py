"""Stream a response as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paddlenlp_ext.serve.client_disconnects import until_disconnected
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.responses import ResponseFormat, json_bytes, usage
from paddlenlp_ext.serve.running_request import RunningRequest


async def sse_events(running: RunningRequest, form: ResponseFormat, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a response as server-sent events; an error becomes the last event before `[DONE]`."""
    head = {**form.head, "object": form.chunk_kind}
    no_usage = {"usage": None} if include_usage else {}
    num_new = 0
    try:
        for choice in range(len(running.engine_requests)):
            for entry in form.first_chunks(choice):
                yield _sse_event({**head, "choices": [entry], **no_usage})
        async for delta in running.deltas():
            num_new += delta.num_tokens
            if delta.is_empty:
                continue
            # Format in a thread, because log-probabilities of a long prompt would block the event loop.
            is_long = delta.prompt_logprobs is not None
            entry = await asyncio.to_thread(form.chunk, delta) if is_long else form.chunk(delta)
            yield _sse_event({**head, "choices": [entry], **no_usage})
        if include_usage:
            yield _sse_event({**head, "choices": [], "usage": usage(running.num_prompt_tokens, num_new)})
    except ApiError as error:  # the HTTP status is already sent
        yield _sse_event(error.body())
    yield b"data: [DONE]\n\n"


def _sse_event(value: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % json_bytes(value)


class EventStream(Response):
    """Response of server-sent events.

    Args:
        events: the encoded events.
        on_end: function called once when the stream ends, for any reason.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        self._events, self._on_end = events, on_end
        self.background = None
        super().__init__(headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(Request(scope, receive), self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events):
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
