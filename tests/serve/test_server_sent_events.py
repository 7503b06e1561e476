"""Streams of server-sent events that end, or whose clients leave."""

from __future__ import annotations

import asyncio

import pytest

from paddlenlp_ext.serve.server_sent_events import EventStream
from tests.serve.test_client_disconnects import SCOPE, never


async def events():
    yield b"one"
    yield b"two"


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 9])
def test_event_stream_that_ends_in_any_way_calls_on_end_once(num_accepted):
    """Leave after any message, the headers included."""
    ended, sent = [], []

    async def use() -> None:
        left = asyncio.Event()

        async def send(message):
            if len(sent) == num_accepted:
                left.set()
                await never()
            sent.append(message.get("body"))

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        stream = EventStream(events(), on_end=lambda: ended.append(True))
        await asyncio.wait_for(stream(SCOPE, receive, send), 10)

    asyncio.run(use())
    assert ended == [True] and sent == [None, b"one", b"two", b""][:num_accepted]
