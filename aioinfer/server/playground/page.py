"""The page and its files: plain HTML, style sheets and modules, served as they are in the package."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator
from html import escape
from importlib import resources

from aiohttp import web

__all__ = ["Page"]

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


class Page:
    """The playground at ``path``, of the API at ``api`` and the feed of steps at ``steps``, if there is one.

    Its links are relative, so it works behind a proxy that serves it under another path. No key guards it:
    it holds nothing that is not in the package.
    """

    def __init__(self, path: str, api: str, steps: str | None) -> None:
        self._path = path
        here = posixpath.dirname(path)
        below = f"{path.rstrip('/')}/playground"
        names = {
            "ASSETS": posixpath.relpath(below, here),
            "API": posixpath.relpath(api or "/", here),
            "STEPS": "" if steps is None else posixpath.relpath(steps, here),
        }
        #: by path: content, media type, hash
        self._bodies: dict[str, tuple[bytes, str, str]] = {}
        for file in resources.files(__package__).joinpath("static").iterdir():
            body = file.read_bytes()
            if file.name == "index.html":
                text = body.decode()
                for name, value in names.items():
                    text = text.replace(f"{{{{{name}}}}}", escape(value))
                body = text.encode()
            self._add(path if file.name == "index.html" else f"{below}/{file.name}", file.name, body)

    def _add(self, path: str, name: str, body: bytes) -> None:
        kind = _TYPES[posixpath.splitext(name)[1]]
        self._bodies[path] = body, kind, hashlib.sha256(body).hexdigest()[:32]

    @property
    def paths(self) -> Iterator[str]:
        """Every path that :meth:`get` answers, the page's own first."""
        yield self._path
        yield from (path for path in self._bodies if path != self._path)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """The file of the route that the request came by."""
        resource = request.match_info.route.resource
        assert resource is not None
        body, kind, tag = self._bodies[resource.canonical]
        known = request.if_none_match or ()
        if any(each.value in (tag, "*") for each in known):
            response = web.Response(status=304, headers=_HEADERS)
        else:
            response = web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
        response.etag = tag
        return response
