"""Cancel the work of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request

STATUS_CLIENT_CLOSED = 499  # as in nginx; the status is never sent, because the client has disconnected


async def until_disconnected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`; if the client disconnects first, cancel the work and return None."""
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
