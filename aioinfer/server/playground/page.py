"""The page and its files: plain HTML, style sheets and modules, served as they are in the package."""

from __future__ import annotations

import hashlib
import posixpath
from dataclasses import dataclass
from html import escape
from importlib import resources

from aiohttp import web

from aioinfer.server.openapi.endpoints import Endpoint

__all__ = ["FILE", "PAGE", "Playground"]

_INDEX = "index.html"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
#: The page can load and reach its own server only, runs no script but its files, writes no HTML from text
#: (trusted types), and is shown in no frame.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for each time, and answered with 304 if it is the same.
    "Cache-Control": "no-cache",
}


PAGE = Endpoint(
    "GET", "/", "A page to try the model with", media="text/html", open=True, place="root", tag="status"
)
FILE = Endpoint(
    "GET",
    "/playground/{file}",
    "A file of that page",
    media="*/*",
    statuses={404: "The page has no such file."},
    open=True,
    place="root",
    tag="status",
)


class Playground:
    """The page at ``path``, for the API at ``api`` and the feed of steps at ``steps``, if there is one.

    Its links are relative, so it works behind a proxy that serves it under another path. No key guards it:
    it holds nothing that is not in the package.
    """

    def __init__(self, path: str, api: str, steps: str | None) -> None:
        below = path.rstrip("/")
        #: the path of its files, for the router
        self.files = below + FILE.path
        here = posixpath.dirname(path)
        names = {
            "ASSETS": posixpath.relpath(posixpath.dirname(self.files), here),
            "API": posixpath.relpath(api or "/", here),
            "STEPS": "" if steps is None else posixpath.relpath(steps, here),
        }
        static = resources.files(__package__) / "static"
        self._files = {file.name: _File.of(file.name, file.read_bytes()) for file in static.iterdir()}
        text = self._files.pop(_INDEX).body.decode()
        for name, value in names.items():
            text = text.replace(f"{{{{{name}}}}}", escape(value))
        self._page = _File.of(_INDEX, text.encode())

    async def page(self, request: web.Request) -> web.StreamResponse:
        return self._page.response(request)

    async def file(self, request: web.Request) -> web.StreamResponse:
        file = self._files.get(request.match_info["file"])
        if file is None:
            raise web.HTTPNotFound
        return file.response(request)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media: str
    tag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> _File:
        return cls(body, _TYPES[posixpath.splitext(name)[1]], hashlib.sha256(body).hexdigest()[:32])

    def response(self, request: web.Request) -> web.Response:
        """The file, or 304 for a client that has it."""
        if any(each.value in (self.tag, "*") for each in request.if_none_match or ()):
            response = web.Response(status=304, headers=_HEADERS)
        else:
            response = web.Response(
                body=self.body, content_type=self.media, charset="utf-8", headers=_HEADERS
            )
        response.etag = self.tag
        return response
