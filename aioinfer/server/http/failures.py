"""Failures: exceptions as status code, headers and OpenAI's error object."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from aioinfer import errors

__all__ = ["Failure", "Refused", "as_failure", "not_found"]

_log = logging.getLogger("aioinfer.server")

#: seconds after which a client is asked to come back, at most
_LATEST = 86_400
#: characters of a message or a field's name, both of which can contain what the client sent
_LONGEST = 1000
#: The openai client retries 408, 409, 429 and 5xx unless this header is false.
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error response: status code, headers and OpenAI's error object."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    #: of the request, for protocols whose errors name it
    request_id: str = ""
    #: the connection is closed after the response
    close: bool = False

    def body(self) -> dict[str, Any]:
        param = None if self.param is None else _clipped(self.param)
        return {
            "error": {"message": _clipped(self.message), "type": self.kind, "param": param, "code": self.code}
        }

    def response(self, body: Mapping[str, Any] | None = None) -> web.Response:
        """The response, with a body of another protocol than OpenAI's if there is one."""
        headers = dict(self.headers)
        if body is not None and "request_id" in body:
            headers["request-id"] = body["request_id"]  # where Anthropic's clients read it
        response = web.Response(
            status=self.status,
            headers=headers,
            text=json.dumps(self.body() if body is None else body),
            content_type="application/json",
        )
        if self.close:
            response.force_close()
        return response


class Refused(Exception):
    """The server itself refuses a request, with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def not_found(kind: str, name: str, param: str | None = None) -> Refused:
    """The failure of a request for what its key does not have, whether another key has it or not."""
    message = f"there is no {kind} {errors.shown(name)}, or no more"
    return Refused(Failure(404, "invalid_request_error", message, param=param, code=f"{kind}_not_found"))


def as_failure(error: BaseException) -> Failure:
    """Translate an exception. An unknown exception is logged; the client receives no details of it."""
    match error:
        case Refused():
            return error.failure
        case errors.InvalidRequest():
            return Failure(400, "invalid_request_error", str(error), param=error.field, code=error.code)
        case errors.ConstraintFailed():
            param = next(iter(error.fields), None)
            return Failure(400, "invalid_request_error", str(error), param=param, code="constraint_failed")
        case errors.Rejected():
            headers = {"Retry-After": str(max(1, math.ceil(min(error.retry_after, _LATEST))))}
            return Failure(429, "rate_limit_error", str(error), code=error.code, headers=headers)
        case errors.TimedOut():
            return Failure(504, "timeout_error", str(error), code=f"{error.phase}_timeout", headers=_NO_RETRY)
        case errors.EngineClosed() | errors.EngineFailed():
            headers = {"Retry-After": "5"}
            return Failure(503, "service_unavailable_error", "the engine is not serving", headers=headers)
        case errors.AioInferError():
            return Failure(500, "server_error", "the request failed in the engine", headers=_NO_RETRY)
        case web.HTTPException():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return Failure(error.status, kind, error.reason, headers=allowed)
    _log.error("an unexpected error in a handler", exc_info=error)
    return Failure(500, "server_error", "internal error")


def _clipped(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... {text[-half:]}"
