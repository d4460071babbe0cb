"""Endpoints: what a route is, declared once for the router and for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from aiohttp import web

from aioinfer.chat.bodies import Object
from aioinfer.server.http.failures import Failure

__all__ = ["Endpoint", "ErrorBody", "Handler", "Place", "Route"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: Where a path begins. "prefix": at that of the engine. "here": at the root of a server, and at the prefix of
#: an engine that is mounted in an application. "root": at the root of a server; mounted, it is not there.
Place = Literal["prefix", "here", "root"]


class ErrorBody(NamedTuple):
    """A form of errors: the name of its schema, the schema, and what makes one of a failure."""

    name: str
    schema: Mapping[str, Any]
    made: Callable[[Failure], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    Attributes:
        method: ``GET``, ``POST`` or ``DELETE``.
        path: relative to ``place``; parameters are in braces.
        summary: what it does, in a few words.
        body: of a ``POST``.
        query: the schemas of parameters of the query, by their names; none must be there.
        example: a body.
        answer: of status 200: a TypedDict, a schema, or None if it is not JSON.
        media: the content type of the answer.
        events: the data of an event of a streamed answer: a TypedDict; None if it cannot be streamed.
        form: how the events of a stream are written.
        last: the data of the last event of a stream, if that is not one of ``events``. A stream that fails
            then ends with an error object.
        statuses: further statuses and their meaning; those with an error object follow from the rest.
        answers: statuses besides 200 with a body of ``answer``, and their meaning.
        generates: it computes tokens.
        open: without an API key.
        place: where the path begins.
        error: the form of its errors; None for OpenAI's.
    """

    method: str
    path: str
    summary: str
    body: type[Object] | None = None
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    answer: Any = None
    media: str = "application/json"
    events: Any = None
    form: str = "Events, each a line `data: ` with JSON and an empty line. The last one is `data: [DONE]`."
    last: str | None = "[DONE]"
    statuses: Mapping[int, str] = field(default_factory=dict)
    answers: Mapping[int, str] = field(default_factory=dict)
    generates: bool = False
    open: bool = False
    place: Place = "prefix"
    error: ErrorBody | None = None
    tag: str = "OpenAI"

    def route(self, handler: Handler) -> Route:
        return Route(self, handler)


class Route(NamedTuple):
    """An endpoint and what answers it."""

    endpoint: Endpoint
    handler: Handler
