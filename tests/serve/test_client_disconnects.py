"""Requests whose clients leave."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from paddlenlp_ext.serve.client_disconnects import until_disconnected

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}


async def never() -> Any:
    await asyncio.sleep(60)


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
