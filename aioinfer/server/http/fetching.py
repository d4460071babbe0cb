"""Fetching: files of other hosts that clients name, which nobody trusts.

Hosts are those of a list. What a name resolves to is checked where the socket is made that is connected, so
that no second look-up can lead elsewhere (DNS rebinding), and every redirect is checked as the first URL was.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from yarl import URL

from aioinfer._version import __version__
from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.limits import ImageLimits

__all__ = ["Fetcher", "is_public"]

_LONGEST_URL = 8192
#: of a name of the DNS (RFC 1035, section 2.3.4)
_LONGEST_HOST = 254
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: connections of all requests
_CONNECTIONS = 16
#: IPv6 addresses that stand for one of IPv4 (RFC 6052)
_TRANSLATED = IPv6Network("64:ff9b::/96")
_HEADERS = {"User-Agent": f"aioinfer/{__version__}", "Accept": "image/*", "Accept-Encoding": "identity"}


def is_public(address: str) -> bool:
    """False for an address that is private, loopback, link-local, multicast, reserved or another one that
    does not belong to a host of the Internet, and for one of IPv6 that stands for such a one."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        within = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _TRANSLATED:
            within = IPv4Address(int(found) & 0xFFFFFFFF)
        if within is not None:
            return is_public(str(within))
        if found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


class Fetcher:
    """Fetches images from the hosts of a config. ``private``: also from addresses that are not public, which
    tests need."""

    def __init__(self, config: ServerConfig, *, private: bool = False) -> None:
        hosts = (config.image_hosts or "").lower().split(",")
        self._hosts = frozenset(each.strip() for each in hosts) - {""}
        self._timeout = config.image_timeout
        self._private = private
        self._made: aiohttp.ClientSession | None = None

    def check(self, text: str, field: str) -> URL:
        """The URL of a text. On any thread. Raises InvalidRequest of ``field``: it is not fetched."""
        try:
            url = URL(text) if len(text) <= _LONGEST_URL else URL()
        except ValueError:
            url = URL()
        if url.scheme not in ("http", "https") or not 0 < len(url.raw_host or "") <= _LONGEST_HOST:
            raise InvalidRequest(field, f"must be a data URI or an HTTP(S) URL, got {shown(text)}")
        if url.raw_user is not None or url.raw_password is not None:
            raise InvalidRequest(field, "must have no user and no password")
        if not self._hosts:
            message = "this server fetches no images (image_hosts is not set): send a data URI"
            raise InvalidRequest(field, message, code="unsupported_parameter")
        if not self._allows(url):
            message = f"this server fetches no images from {shown(url.authority)}: it is not in image_hosts"
            raise InvalidRequest(field, message, code="unsupported_parameter")
        return url

    def _allows(self, url: URL) -> bool:
        host = (url.raw_host or "").rstrip(".").lower()
        labels = host.split(".")
        names = {host, "*", *(f"*.{'.'.join(labels[at:])}" for at in range(1, len(labels)))}
        usual = names if url.is_default_port() else set()
        return not self._hosts.isdisjoint(usual | {f"{name}:{url.port}" for name in names})

    async def fetch(self, url: URL, field: str, limits: ImageLimits, count: Callable[[int], None]) -> bytes:
        """The file at a URL that was checked. ``count`` is told the bytes of each piece as it arrives, and
        may raise. Raises InvalidRequest of ``field``: it cannot be fetched, or is too large."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._followed(url, field, limits, count)
        except TimeoutError:
            message = f"the image did not arrive within {self._timeout:g} s (image_timeout)"
            raise InvalidRequest(field, message) from None
        except aiohttp.ClientConnectorError as error:
            # The reason would tell of networks that only this server sees.
            message = f"{shown(error.host)} cannot be connected to at a public address"
            raise InvalidRequest(field, message) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(field, "its server does not answer with a whole image") from error

    async def _followed(
        self, url: URL, field: str, limits: ImageLimits, count: Callable[[int], None]
    ) -> bytes:
        for _ in range(1 + _MOST_REDIRECTS):
            async with self._session().get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response, field, limits, count)
                target = response.headers.get("Location", "")
            try:
                joined = str(url.join(URL(target[:_LONGEST_URL])))
            except ValueError:
                joined = target
            try:
                url = self.check(joined, field)
            except InvalidRequest as refused:
                raise InvalidRequest(field, f"is redirected: {refused.message}", code=refused.code) from None
        raise InvalidRequest(field, f"is redirected more than {_MOST_REDIRECTS} times")

    async def _read(
        self, response: aiohttp.ClientResponse, field: str, limits: ImageLimits, count: Callable[[int], None]
    ) -> bytes:
        if response.status != 200:
            raise InvalidRequest(field, f"its server answers with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequest(field, "its server compresses the image, which was not asked for")
        if response.content_length:
            limits.check_bytes(response.content_length, field)
        body = bytearray()
        async for piece in response.content.iter_any():
            limits.check_bytes(len(body) + len(piece), field)
            count(len(piece))
            body += piece
        return bytes(body)

    def _session(self) -> aiohttp.ClientSession:
        """The session, of the running loop."""
        if self._made is None:
            self._made = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS, socket_factory=self._socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._made

    def _socket(self, info: Any) -> socket.socket:
        """A socket for a connection to the address of a look-up's entry."""
        family, kind, protocol, _, address = info
        if not self._private and not is_public(address[0]):
            raise OSError(errno.EACCES, "the address is not public")
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        made, self._made = self._made, None
        if made is not None:
            await made.close()
