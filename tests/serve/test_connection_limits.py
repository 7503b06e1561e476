"""Clients with many connections."""

from __future__ import annotations

import asyncio
import contextlib

import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from paddlenlp_ext.serve import connection_limits
from paddlenlp_ext.serve.connection_limits import TimedConnection


def test_connection_beyond_the_limit_of_its_client_is_reset_until_another_one_is_closed(monkeypatch):
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 2)
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
