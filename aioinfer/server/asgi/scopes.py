"""Scopes: what an ASGI server says of a request, as the message that aiohttp's parser makes of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from aiohttp import HttpVersion, hdrs
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

__all__ = ["CODEC", "Message", "Receive", "Scope", "Send", "message_of", "root_of"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

#: what aiohttp decodes headers with, so that no byte is lost
CODEC = ("utf-8", "surrogateescape")


def message_of(scope: Scope) -> RawRequestMessage:
    """The request in a scope of type "http", with its path below ``root_path``."""
    path = _path_below_root(scope)
    query = scope.get("query_string", b"").decode("latin-1")
    raw = tuple(
        (bytes(name), bytes(value)) for name, value in scope["headers"] if not _is_continue(name, value)
    )
    headers = CIMultiDict((name.decode(*CODEC), value.decode(*CODEC)) for name, value in raw)
    major, _, minor = scope.get("http_version", "1.1").partition(".")
    return RawRequestMessage(
        method=scope["method"],
        path=f"{path}?{query}" if query else path,
        version=HttpVersion(int(major), int(minor or 0)),
        headers=CIMultiDictProxy(headers),
        raw_headers=raw,
        should_close=False,  # connections are the server's
        compression=None,
        upgrade=False,
        chunked="chunked" in headers.get(hdrs.TRANSFER_ENCODING, "").lower(),
        url=URL.build(path=path, query_string=query, encoded=True),
    )


def root_of(scope: Scope) -> str:
    """The path that the application is mounted at, decoded; empty: at the root."""
    root: str = scope.get("root_path", "")
    return root.rstrip("/")


def _is_continue(name: bytes, value: bytes) -> bool:
    """``Expect: 100-continue``, which the server meets when the body is received."""
    return name.lower() == b"expect" and value.lower() == b"100-continue"


def _path_below_root(scope: Scope) -> str:
    """The path as it was sent, without the root. Its escapes stay: a name of a model may hold a slash."""
    path: str = scope["path"]
    raw = (scope.get("raw_path") or b"").partition(b"?")[0].decode(*CODEC) or quote(path)
    root = root_of(scope)
    # Servers and frameworks of before 2023 have taken the root off already.
    if not root or not f"{path}/".startswith(f"{root}/"):
        return raw or "/"
    slashes = root.count("/") + 1
    parts = raw.split("/", slashes)
    if unquote("/".join(parts[:slashes])) == root:
        return f"/{''.join(parts[slashes:])}"
    return quote(path.removeprefix(root)) or "/"
