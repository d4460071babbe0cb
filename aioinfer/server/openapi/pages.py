"""The document and the page that shows it, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files
from typing import Any

from aiohttp import web

from aioinfer.server.http.records import record_of
from aioinfer.server.openapi.document import document
from aioinfer.server.openapi.endpoints import Endpoint, Route

__all__ = ["Pages"]

DOCUMENT = Endpoint(
    "GET", "/openapi.json", "This document", answer={"type": "object"}, open=True, place="here", tag="status"
)
PAGE = Endpoint(
    "GET",
    "/docs",
    "A page that shows this document",
    media="text/html",
    open=True,
    place="here",
    tag="status",
)
#: Nothing from outside, and no frame around it.
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Pages:
    """The handlers. The document has the routes that are given with :meth:`show`."""

    def __init__(self, *, keyed: bool) -> None:
        self._keyed = keyed
        self._shown: Sequence[tuple[str, Endpoint]] = ()

    def routes(self) -> list[Route]:
        return [DOCUMENT.route(self.document), PAGE.route(self.page)]

    def show(self, endpoints: Sequence[tuple[str, Endpoint]]) -> None:
        """These endpoints, each with its whole path, once, before the first request."""
        self._shown = endpoints

    async def document(self, request: web.Request) -> web.StreamResponse:
        path = next(path for path, endpoint in self._shown if endpoint is DOCUMENT)
        # Where a parent application has added or mounted this one, its paths begin there.
        base = record_of(request).root + request.path.removesuffix(path)
        servers = json.dumps([{"url": base or "/"}])
        return web.Response(text=f'{{"servers": {servers}, {self._written}', content_type="application/json")

    async def page(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=self._html, content_type="text/html", headers=headers)

    @cached_property
    def _written(self) -> str:
        """The document without its first brace."""
        found: dict[str, Any] = document(self._shown, keyed=self._keyed)
        return json.dumps(found)[1:]

    @cached_property
    def _html(self) -> str:
        return (files(__package__) / "page.html").read_text("utf-8")
