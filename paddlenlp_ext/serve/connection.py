"""End of connections: clients that leave, that send no request in time, or that do not read their stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import anyio
import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.serve")
STATUS_CLIENT_CLOSED = 499  # no client reads this status


class TimedConnection(H11Protocol):
    """HTTP connection that is closed if it waits longer than `timeout` seconds for the headers of a request.

    uvicorn limits this time between two requests only, and not once a part of the second one has arrived.
    """

    def __init__(self, *arguments: Any, timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a request."""
        super().connection_lost(exc)
        self._stop_waiting()

    def handle_events(self) -> None:
        """Handle what has arrived; stop waiting when the headers are complete, and wait again after the response."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._timeout, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class EventStream(Response):
    """Stream of server-sent events; a client that does not read for `timeout` seconds is disconnected.

    Args:
        parts: the events.
        timeout: seconds in which the client must accept a part.
        on_end: called once when the stream ends, in whatever way.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], timeout: float, on_end: Callable[[], None]) -> None:
        self._parts, self._timeout, self._on_end = parts, timeout, on_end
        self.background = None
        super().__init__(headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(Request(scope, receive), self._send_all(send))
        except TimeoutError:
            logger.info("a client did not read its stream in time and was disconnected")
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await self._send_one(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._parts):
            async for part in self._parts:
                await self._send_one(send, {"type": "http.response.body", "body": part, "more_body": True})
        await self._send_one(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_one(self, send: Send, message: Message) -> None:
        with anyio.fail_after(self._timeout):
            await send(message)


async def until_disconnected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`; None if the client closes the connection first, which cancels it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
