"""The playground: one static page to try the model with and to watch its engine."""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from html import escape
from importlib.resources import files

from aiohttp import web

from aioinfer.server.openapi.endpoints import Endpoint, Handler

__all__ = ["PAGE", "playground_page"]

PAGE = Endpoint(
    "GET", "/", "A page to try the model with", media="text/html", open=True, place="root", tag="status"
)


def playground_page(path: str, api: str, steps: str | None) -> Handler:
    """The handler of the page at ``path``, for the API at ``api`` and the feed at ``steps``, if there is one.

    Its links are relative, so it works behind a proxy that serves it under another path. No key guards it: it
    holds nothing that is not in the package.
    """
    here = posixpath.dirname(path)
    text = (files(__package__) / "playground.html").read_text("utf-8")
    headers = {
        "Content-Security-Policy": _policy(text),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    text = text.replace("{{API}}", escape(posixpath.relpath(api or "/", here)))
    text = text.replace("{{STEPS}}", "" if steps is None else escape(posixpath.relpath(steps, here)))

    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type="text/html", headers=headers)

    return page


def _policy(html: str) -> str:
    """Allow the page its own script and its own server only; no HTML from text (trusted types), no frame."""
    hashes = {}
    for name in ("script", "style"):
        (content,) = re.findall(f"<{name}[^>]*>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[name] = f"{name}-src 'sha256-{digest}'"
    return "; ".join(
        [
            "default-src 'none'",
            hashes["script"],
            hashes["style"],
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
