"""Errors in Anthropic's form."""

from __future__ import annotations

import uuid
from typing import Any

from aioinfer.server.anthropic.fields import NO_THREADS
from aioinfer.server.http.failures import Failure

__all__ = ["error_body"]

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


def error_body(failure: Failure) -> dict[str, Any]:
    """The error object of a failure, with an id of its own. The message begins with the field's name."""
    kind = _TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": failure.body()["error"]["message"]}
    if failure.code == NO_THREADS:
        # Clients that begin with a thread go on without one.
        error["details"] = {"error_code": NO_THREADS, "unsupported": [failure.param]}
    return {"type": "error", "error": error, "request_id": failure.request_id or f"req_{uuid.uuid4().hex}"}
