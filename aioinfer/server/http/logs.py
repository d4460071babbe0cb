"""Logs about clients: events that clients can cause at will are limited in rate, and lines of the access log
in length."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import HttpVersion, web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from aioinfer.server.http.records import record_of

__all__ = ["ACCESS", "CLIENT_GONE", "HTTP", "AccessLog", "JsonLines", "Throttle"]

#: one line per request, if the config says so
ACCESS = logging.getLogger("aioinfer.access")
#: nginx's status of a request whose client has left
CLIENT_GONE = 499
#: aiohttp's messages about connections
HTTP = logging.getLogger("aioinfer.server.http")

#: what a record of the access log may have
_FIELDS = (
    *("time", "remote", "method", "path", "status", "bytes", "seconds", "id", "key", "model"),
    *("prompt_tokens", "output_tokens", "ttft", "finish_reason", "call", "user_agent"),
)
_INTERVAL = 60.0
_LONGEST = 200
#: characters of a User-Agent
_AGENT = 120


class Throttle:
    """Logs a warning at most once per ``interval`` seconds; the next one says how many were left out."""

    def __init__(
        self, log: logging.Logger, *, interval: float = _INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._interval = interval
        self._clock = clock
        self._next = -float("inf")
        self._left_out = 0

    def admits(self) -> bool:
        """Whether the event is logged now."""
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return False
        self._next = now + self._interval
        return True

    def note(self) -> str:
        """The number of events that were left out since the last one that was logged."""
        count, self._left_out = self._left_out, 0
        return f" ({count} more since the last message)" if count else ""

    def warning(self, message: str) -> None:
        if self.admits():
            self._log.warning("%s%s", message, self.note())


class JsonLines(logging.Formatter):
    """The fields of a record of the access log as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        found = vars(record)
        return json.dumps({name: found[name] for name in _FIELDS if name in found})


class AccessLog(AbstractAccessLogger):
    """Writes the access log; texts of the client are quoted and cut. Records have the fields of a line as
    attributes. Their message is the line if ``log_format`` is "text", else method, path and status: JSON of
    the fields is a formatter's work, such as :class:`JsonLines`."""

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if not self.enabled:
            return
        entry = _entry(request, response, time)
        if self.log_format == "json":
            asked = json.dumps(f"{entry['method']} {entry['path']}")
            self.logger.info("%s %s", asked, entry["status"], extra=entry)
        else:
            self.logger.info("%s", _text(dict(entry), request.version), extra=entry)

    @classmethod
    def of_cancelled(cls, form: str) -> Middleware:
        """A middleware that writes the line of a handler that is cancelled, because its client has left:
        aiohttp writes none."""
        log = cls(ACCESS, form)

        @web.middleware
        async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except asyncio.CancelledError:
                seconds = time.perf_counter() - record_of(request).started
                log.log(request, web.Response(status=CLIENT_GONE), seconds)
                raise

        return logged


def _entry(request: web.BaseRequest, response: web.StreamResponse, seconds: float) -> dict[str, Any]:
    """The fields of a line. Those of calls for tokens are left out for other requests."""
    record = record_of(request)
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "remote": request.remote or "unix",
        "method": request.method[:20],
        # As it was sent: without the query, and line breaks are escaped.
        "path": request.rel_url.raw_path[:_LONGEST],
        "status": response.status,
        "bytes": response.body_length,
        "seconds": round(seconds, 6),
        "id": record.id,
    }
    if record.key is not None:
        entry["key"] = record.key.name
    if record.model is not None:
        entry |= {
            "model": record.model,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "ttft": None if record.ttft is None else round(record.ttft, 6),
            "finish_reason": record.finish_reason,
        }
        if record.call is not None and not record.call.endswith(record.id):
            entry["call"] = record.call
    entry["user_agent"] = request.headers.get("User-Agent", "")[:_AGENT]
    return entry


def _text(entry: dict[str, Any], version: HttpVersion) -> str:
    protocol = f"HTTP/{version.major}.{version.minor}"
    asked = json.dumps(f"{entry.pop('method')} {entry.pop('path')} {protocol}")
    head = (entry.pop(name) for name in ("remote", "status", "bytes", "seconds"))
    remote, status, size, seconds = head
    del entry["time"]
    plain = (
        f"{name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in entry.items()
    )
    return f"{remote} {asked} {status} {size} {seconds:.6f} {' '.join(plain)}"


class _Brief(logging.Filter):
    """aiohttp logs a traceback for each request that is not HTTP, and for clients that disconnect. The former
    become one line, limited in rate, the latter debug messages."""

    def __init__(self) -> None:
        super().__init__()
        self._malformed = Throttle(HTTP)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (ConnectionError, web.RequestPayloadError)):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return HTTP.isEnabledFor(logging.DEBUG)
        if isinstance(error, HttpProcessingError):
            if not self._malformed.admits():
                return False
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            what = " ".join(error.message.split())[:_LONGEST]
            record.msg = f"{record.getMessage()}: {what}{self._malformed.note()}"
            record.args, record.exc_info, record.exc_text = None, None, None
        return True


HTTP.addFilter(_Brief())
