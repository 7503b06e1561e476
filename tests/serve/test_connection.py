"""End of streams and of requests whose clients leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from paddlenlp_ext.serve.connection import EventStream, until_disconnected

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}


async def never() -> Any:
    await asyncio.sleep(60)


async def parts():
    yield b"one"
    yield b"two"


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 9])
@pytest.mark.parametrize("leaves", [False, True])
def test_event_stream_that_ends_in_any_way_calls_on_end_once(num_accepted, leaves):
    """Stop reading after any message, the headers included, or leave in place of reading on."""
    ended, sent = [], []

    async def use() -> None:
        left = asyncio.Event()

        async def send(message):
            if len(sent) == num_accepted:
                left.set()
                await never()
            sent.append(message.get("body"))

        async def receive():
            await (left.wait() if leaves else never())
            return {"type": "http.disconnect"}

        stream = EventStream(parts(), 60 if leaves else 0.01, on_end=lambda: ended.append(True))
        await asyncio.wait_for(stream(SCOPE, receive, send), 10)

    asyncio.run(use())
    assert ended == [True] and sent == [None, b"one", b"two", b""][:num_accepted]


def test_until_disconnected_cancels_the_work_of_a_client_that_leaves():
    states = []

    async def work():
        try:
            states.append("runs")
            await never()
        finally:
            states.append("cancelled")

    async def use():
        async def receive():
            while not states:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        return await asyncio.wait_for(until_disconnected(Request(SCOPE, receive), work()), 10)

    assert asyncio.run(use()) is None and states == ["runs", "cancelled"]
