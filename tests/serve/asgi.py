"""Client of an ASGI application in this process, without network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any


class Reply:
    """Response of the application.

    Attributes:
        status, headers: status and headers.
        parts: bodies of the messages, in the order in which they were sent.
        defect: exception that the application raised after a response with status 500.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.defect: Exception | None = None

    @property
    def json(self) -> Any:
        """Body as JSON."""
        return json.loads(b"".join(self.parts))

    @property
    def events(self) -> list[Any]:
        """Server-sent events, whose framing is checked."""
        text = b"".join(self.parts).decode()
        assert self.headers["content-type"].startswith("text/event-stream")
        assert text.endswith("\n\n")
        lines = text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


async def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    chunks: Sequence[bytes] | None = None,
    leave_after: int | None = None,
    is_slow: bool = False,
) -> Reply:
    """Send a request and return the response.

    Args:
        app: the application.
        path: path of the URL.
        body: value to send as JSON, or bytes to send as they are.
        method: HTTP method; None: POST with a body, else GET.
        headers: further headers; None as a value removes one.
        chunks: parts of the body, in place of `body`.
        leave_after: number of body messages after which the client closes the connection.
        is_slow: never send the end of the request.
    """
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    parts = [data] if chunks is None else list(chunks)
    has_body = body is not None or chunks is not None
    sent = {"host": "127.0.0.1:8000", **({"content-type": "application/json"} if has_body else {}), **(headers or {})}
    reply, left = Reply(), asyncio.Event()
    if leave_after == 0:
        left.set()

    async def receive() -> dict[str, Any]:
        if parts:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts) or is_slow}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.parts.append(message["body"])
            if leave_after is not None and len(reply.parts) >= leave_after:
                left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method or ("POST" if has_body else "GET"),
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    try:
        await app(scope, receive, send)
    except Exception as error:  # the HTTP server logs it
        if reply.status != 500:
            raise
        reply.defect = error
    return reply


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[None]:
    """Run the application's lifespan around a block."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
        await task
