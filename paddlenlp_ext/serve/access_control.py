"""Check the headers and the API key of requests; without a key, accept only Host headers that name this computer."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.responses import error_response

MAX_HEADER_BYTES = 1 << 14


class AccessCheck:
    """Middleware that limits the size of headers and checks the API key, or the Host header if there is no key.

    Requests to /health need no key. The HTTP library limits the size of headers only if they arrive in several parts.
    With DNS rebinding, a web page can reach a server on its visitor's computer: the page's host name then resolves to
    the loopback address. The Host header still contains the page's host name, so the request is rejected.

    Args:
        app: the application.
        api_key: key that clients send as `Authorization: Bearer KEY`, or None.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._expected = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error_response(error))(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return ApiError(431, f"the headers have over {MAX_HEADER_BYTES} bytes; send fewer", "headers_too_large")
        if scope["path"] == "/health":
            return None
        headers = Headers(scope=scope)
        if self._expected is None:
            host = headers.get("host", "")
            problem = f"the host {host[:60]!r} is not local; connect to localhost, or start the server with an API key"
            return None if _is_local(host) else ApiError(403, problem, "host_not_local")
        if hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), self._expected):
            return None
        return ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", "invalid_api_key")


def _is_local(host: str) -> bool:
    """Return whether a Host header is localhost or a loopback address."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
