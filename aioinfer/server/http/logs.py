"""What the server logs of its clients: events that clients can cause at will are limited in rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError

__all__ = ["ACCESS", "ACCESS_FORMAT", "HTTP", "Throttle"]

#: one line per request, if the config says so
ACCESS = logging.getLogger("aioinfer.access")
#: address, request line, status code, bytes, seconds
ACCESS_FORMAT = '%a "%r" %s %b %Tf'
#: aiohttp's messages about connections
HTTP = logging.getLogger("aioinfer.server.http")

_INTERVAL = 60.0
_LONGEST = 200


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
        """The event is logged now."""
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return False
        self._next = now + self._interval
        return True

    def note(self) -> str:
        """How many events were left out since the last one that was logged."""
        count, self._left_out = self._left_out, 0
        return f" ({count} more since the last message)" if count else ""

    def warning(self, message: str) -> None:
        if self.admits():
            self._log.warning("%s%s", message, self.note())


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
