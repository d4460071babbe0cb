"""Records of requests, from the first byte to the line in the access log.

The id comes from the client's ``x-request-id`` if that is short and plain, and is minted otherwise. It is a
header of every response, the end of the answer's own id unless the body names one or the answer is stored,
and a name in the trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from aioinfer.chat.answers import AnswerReader
from aioinfer.server.http.bodies import BodyBytes
from aioinfer.server.http.keys import Key
from aioinfer.stream import Stream

__all__ = ["REQUEST_ID", "Record", "add_headers", "record_of", "recorded"]

#: the header of requests and of responses
REQUEST_ID = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: choices of a call whose times are read
_LOOKED_AT = 8


@dataclass(slots=True)
class Record:
    """One request. Times in seconds; ``started`` is of ``perf_counter``."""

    id: str
    started: float
    #: where an ASGI application is mounted, in front of the paths of requests; empty: at the root
    root: str = ""
    #: the key that it was sent with
    key: Key | None = None
    #: of a call for tokens: its model's name and the id of its answer
    model: str | None = None
    call: str | None = None
    #: of all its prompts and choices
    prompt_tokens: int = 0
    output_tokens: int = 0
    #: from arrival in the engine to the first token of any choice
    ttft: float | None = None
    finish_reason: str | None = None
    #: the parsers of its choices, if its answer is parsed
    readers: Sequence[AnswerReader | None] = ()
    body: BodyBytes = field(default_factory=BodyBytes)

    @property
    def owner(self) -> str:
        """Who has what is kept for the request: the name of its key; empty without keys."""
        return "" if self.key is None else self.key.name

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """A call for tokens, within the limits of its key. Raises Refused (429)."""
        if self.key is not None:
            self.key.enter()
        try:
            yield
        finally:
            self.body.release()
            if self.key is not None:
                self.key.leave(self.prompt_tokens + self.output_tokens)

    @contextlib.contextmanager
    def counting(self, streams: Sequence[Stream], choices: int) -> Iterator[None]:
        """Count the tokens of ``streams`` when the block is left, in any way; ``choices`` per prompt."""
        how = "error"
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            how = "disconnect"
            raise
        finally:
            self._count(streams, choices, how)

    def _count(self, streams: Sequence[Stream], choices: int, how: str) -> None:
        reasons: list[str] = []
        for index, stream in enumerate(streams):
            usage = stream.usage
            self.output_tokens += usage.completion_tokens
            if index % choices == 0:  # the choices of a prompt share it
                self.prompt_tokens += usage.prompt_tokens
            reason: str = stream.finish_reason or "abort"
            if index < len(self.readers) and (reader := self.readers[index]) is not None:
                reason = reader.finish_reason(reason)  # calls of tools
            reasons.append(how if reason == "abort" else reason)
        times = [stream.metrics.ttft for stream in streams[:_LOOKED_AT]]
        self.ttft = min((each for each in times if each is not None), default=None)
        # Of several choices: what went wrong with one of them, or how the first one ended.
        self.finish_reason = self.finish_reason or next(
            (each for each in reasons if each == how), reasons[0] if reasons else how
        )


#: aiohttp warns of keys that are text from 3.14 on, and has no others before
_NAME: Any = web.RequestKey("aioinfer.record", Record) if hasattr(web, "RequestKey") else "aioinfer.record"


def record_of(request: web.BaseRequest) -> Record:
    """The record of a request, which begins with the first call."""
    record: Record | None = request.get(_NAME)
    if record is None:
        given = request.headers.get(REQUEST_ID, "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        record = request[_NAME] = Record(name, time.perf_counter())
    return record


@web.middleware
async def recorded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Begins the record of every request of an application."""
    record_of(request)
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For ``on_response_prepare``: the id of a request that has a record, and what its key has left."""
    record: Record | None = request.get(_NAME)
    if record is None:
        return
    response.headers[REQUEST_ID] = record.id
    response.headers.setdefault("request-id", record.id)  # what Anthropic's clients read
    if record.key is not None:
        response.headers.update(record.key.headers())
