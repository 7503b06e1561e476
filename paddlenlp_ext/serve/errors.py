"""Errors of requests, in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error of one request.

    Attributes:
        status: HTTP status.
        code: short name of the error.
        param: invalid field of the request, or None.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, problem: str) -> ApiError:
    """Return the error of a field whose value has the wrong type or is out of range."""
    return ApiError(422, f"{param}: {problem}", "invalid_value", param)
