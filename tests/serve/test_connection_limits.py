"""Requests whose clients leave, and clients with many connections."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.server import ServerState

from paddlenlp_ext.serve import client_disconnects
from paddlenlp_ext.serve.client_disconnects import TimedConnection, until_disconnected

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


def test_connection_beyond_the_limit_of_its_client_is_reset_until_another_one_is_closed(monkeypatch):
    monkeypatch.setattr(client_disconnects, "MAX_CONNECTIONS", 2)
    config, state = uvicorn.Config(Response("x"), log_level="critical"), ServerState()
    config.load()

    async def answered(reader, writer) -> bool:
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return bool(await reader.read(100))
        return False

    async def use():
        def protocol():
            return TimedConnection(config=config, server_state=state, app_state={}, timeout=60)

        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        found = [await answered(*each) for each in opened]
        opened[0][1].close()
        while TimedConnection._num_open["127.0.0.1"] > 1:
            await asyncio.sleep(0.01)
        found.append(await answered(*await asyncio.open_connection("127.0.0.1", port)))
        server.close()
        return found

    assert asyncio.run(use()) == [True, True, False, True]
