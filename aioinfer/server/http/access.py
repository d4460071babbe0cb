"""Access of web pages: only those that the config lists may use a server.

A browser lets any page send requests to servers of its machine and network. Two checks keep out pages that
are not this server's own. ``Host`` must be a name of this server: a page whose name was pointed to this
address (DNS rebinding) sends its own name. ``Origin`` must be this server or listed in ``cors_origins``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aioinfer.config import ServerConfig, is_loopback
from aioinfer.server.http.failures import Failure, Refused

__all__ = ["WebAccess", "host_name"]

#: seconds that a browser may remember the response to a preflight request
_PREFLIGHT_AGE = "600"
_METHODS = "GET, POST, DELETE, OPTIONS"
#: headers of responses that scripts may read
_EXPOSED = ", ".join(
    (
        "Retry-After",
        "x-request-id",
        *(f"x-ratelimit-{each}-tokens" for each in ("limit", "remaining", "reset")),
    )
)


class WebAccess:
    """Checks ``Host`` and ``Origin``, and answers in the protocol of CORS."""

    def __init__(self, config: ServerConfig) -> None:
        own = config.allowed_hosts
        self._listed = frozenset(_items(own or "")) | {config.host.lower()}
        # A key is not sent by a browser on its own, a page cannot reach a Unix socket, and an address other
        # than loopback has names that the server does not know.
        open_to_names = own is None and (
            config.needs_key or config.uds is not None or not is_loopback(config.host)
        )
        self._any_host = open_to_names or "*" in self._listed
        self._origins = frozenset(item.rstrip("/") for item in _items(config.cors_origins or ""))

    def check(self, request: web.Request) -> None:
        """Raises Refused (403)."""
        if not self._any_host:
            self._check_hosts(request, addresses=False)
        self._check_origins(request)

    def _check_origins(self, request: web.Request) -> None:
        for origin in request.headers.getall("Origin", ()):
            if not self._allows_origin(origin, request):
                raise _forbidden(f"the origin {origin[:200]!r} is not in cors_origins", "origin_not_allowed")

    def check_local(self, request: web.Request) -> None:
        """Raise Refused (403) unless ``Host`` is an address, a loopback name or listed, on any socket: the
        config of a mounted engine does not know where its application listens."""
        if "*" not in self._listed:
            self._check_hosts(request, addresses=True)
        self._check_origins(request)

    def _check_hosts(self, request: web.Request, *, addresses: bool) -> None:
        # Browsers always send one.
        for value in request.headers.getall("Host", ()):
            name = host_name(value)
            if not (name in self._listed or is_loopback(name) or (addresses and _is_address(name))):
                raise _forbidden(f"the host {value[:200]!r} is not in allowed_hosts", "host_not_allowed")

    def _allows_origin(self, origin: str, request: web.Request) -> bool:
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        host = request.headers.get("Host", "").lower()
        return bool(host) and origin.lower().partition("://")[2] == host

    # -- CORS -----------------------------------------------------------------------------------

    def middleware(self, exempt: Container[str]) -> Middleware:
        """Checks every request but those of the paths ``exempt``, and responds to preflight requests."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path in exempt:
                return await handler(request)
            self.check(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return self._preflight(request)
            return await handler(request)

        return checked

    def _preflight(self, request: web.Request) -> web.Response:
        headers = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": _PREFLIGHT_AGE,
        }
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For ``on_response_prepare``: scripts of an allowed origin may read the response."""
        origin = request.headers.get("Origin")
        if not self._origins:
            return
        response.headers["Vary"] = "Origin"
        if origin is not None and self._allows_origin(origin, request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _forbidden(message: str, code: str) -> Refused:
    return Refused(Failure(403, "permission_error", message, code=code))


def _items(text: str) -> list[str]:
    return [item.strip().lower() for item in text.split(",") if item.strip()]


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header, without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
