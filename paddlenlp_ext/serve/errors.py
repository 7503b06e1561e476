"""Request errors, in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

_TYPES = {403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error of one request.

    Attributes:
        status: HTTP status.
        message: description of the problem, with its remedy.
        code: short name of the error.
        param: invalid field of the request, or None.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(status, message, code, param)  # all arguments, because another process pickles the error
        self.status, self.message, self.code, self.param = status, message, code, param

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    """Return the error of a field that is missing or unknown, or whose value has the wrong type or is out of range.

    Status and codes are OpenAI's: `invalid_value`, `invalid_type`, `missing_required_parameter`, `unknown_parameter`.
    """
    return ApiError(400, f"{param}: {problem}", code, param)
