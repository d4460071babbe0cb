"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from aioinfer.server.http.failures import Failure

__all__ = ["error_body", "failed"]

#: type of an error by the status of the response; others by their hundreds
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def failed(failure: Failure) -> web.Response:
    """The response to a request that failed before its answer began."""
    response = failure.response(error_body(failure, failure.request_id))
    response.headers["request-id"] = failure.request_id  # where Anthropic's clients read it
    return response


def error_body(failure: Failure, request_id: str) -> dict[str, Any]:
    """The error object of a failure. The message begins with the field's name."""
    kind = _TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": failure.body()["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}
