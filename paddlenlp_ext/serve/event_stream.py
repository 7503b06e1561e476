"""Response of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.serve")


class EventStream(Response):
    """Stream of server-sent events; a client that does not read for `timeout` seconds is disconnected."""

    def __init__(self, parts: AsyncIterator[bytes], timeout: float) -> None:
        self._parts, self._timeout = parts, timeout
        self.background = None
        super().__init__(headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(disconnection(Request(scope, receive)))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            logger.info("a client did not read its stream in time and was disconnected")
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        try:
            await self._send_one(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._parts:
                await self._send_one(send, {"type": "http.response.body", "body": part, "more_body": True})
            await self._send_one(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._parts.aclose()  # type: ignore[attr-defined]

    async def _send_one(self, send: Send, message: Message) -> None:
        with anyio.fail_after(self._timeout):
            await send(message)


async def disconnection(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
