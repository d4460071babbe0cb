"""Sockets of the server, bound before a model loads, and how many the limit of open files allows."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.server.http.tls import tls_context
from aioinfer.server.http.unix import UnixSocket
from aioinfer.system.files import file_limit, open_files

__all__ = ["Bound", "bind", "bind_all", "connection_limit", "listen"]

_log = logging.getLogger("aioinfer.server")

#: connections that the system keeps until they are accepted
_BACKLOG = 1024
#: seconds that a client has to answer the end of TLS
_GOODBYE = 2.0
#: connections that asyncio's loop accepts in one turn, which it takes from its argument ``backlog``
_ACCEPTS = 2
#: connections where neither the config nor the limit of open files says fewer
_DEFAULT_CONNECTIONS = 4096
#: files that are left for everything else that the process opens while it serves
_SPARE_FILES = 32
#: errors of one address of a host that has others, like ::1 where IPv6 is switched off
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(slots=True)
class Bound:
    """The sockets of one server, bound and not yet listening; ``tls`` is that of the public ones."""

    public: list[socket.socket] = field(default_factory=list)
    admin: list[socket.socket] = field(default_factory=list)
    tls: ssl.SSLContext | None = None
    files: list[UnixSocket] = field(default_factory=list)

    def close(self) -> None:
        """Close all of them and remove the files of Unix sockets. Idempotent."""
        for each in (*self.public, *self.admin):
            each.close()
        for file in self.files:
            file.close()

    def add_unix(self, path: str, mode: int) -> socket.socket:
        """Raises ConfigError."""
        self.files.append(UnixSocket(path, mode))
        return self.files[-1].socket


async def bind_all(config: ServerConfig, given: Sequence[socket.socket] | None = None) -> Bound:
    """The sockets that a config names; ``given``: instead of its host, port and ``uds``. Reads the files of
    TLS. Raises ConfigError."""
    bound = Bound(tls=tls_context(config))
    try:
        if given is not None:
            bound.public += given
        elif config.uds is not None:
            bound.public.append(bound.add_unix(config.uds, config.socket_mode))
        else:
            bound.public += await bind(config.host, config.port)
        if config.admin_port is not None:
            bound.admin += await bind("127.0.0.1", config.admin_port)
        if config.admin_uds is not None:
            bound.admin.append(bound.add_unix(config.admin_uds, config.socket_mode))
    except BaseException:
        bound.close()
        raise
    return bound


async def listen(
    protocols: Callable[[], asyncio.Protocol],
    bound: socket.socket,
    host: str,
    *,
    tls: ssl.SSLContext | None = None,
    handshake: float | None = None,
) -> asyncio.Server:
    """Serve a bound socket. ``host`` is named in errors; ``handshake``: seconds that TLS may take to begin.

    aiohttp's sites have neither this bound nor one on the connections that are accepted in a row. Raises
    ConfigError: another program has begun to listen there.
    """
    unix = bound.family not in (socket.AF_INET, socket.AF_INET6)
    try:
        # Another program may have begun to listen since the socket was bound. uvloop hangs on this error.
        bound.listen(_BACKLOG)
    except OSError as error:
        if unix:
            raise ConfigError(
                f"cannot listen on the socket {bound.getsockname()}: {error.strerror}"
            ) from error
        raise cannot_listen(error, host, bound.getsockname()[1]) from error
    loop: Any = asyncio.get_running_loop()
    create = loop.create_unix_server if unix else loop.create_server
    times = {} if tls is None else {"ssl_handshake_timeout": handshake, "ssl_shutdown_timeout": _GOODBYE}
    server: asyncio.Server = await create(protocols, sock=bound, backlog=_ACCEPTS, ssl=tls, **times)
    bound.listen(_BACKLOG)
    return server


async def bind(host: str, port: int) -> list[socket.socket]:
    """A bound socket for every address of ``host``, not yet listening; port 0 is one free port for all.

    Raises ConfigError: the host is unknown or not of this machine, the port is in use or not permitted.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is unknown: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"host {host!r} cannot be used: {error}") from error
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound(family, kind, protocol, (address[0], chosen, *address[2:])))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                failed = error
        if not sockets:
            raise failed or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for each in sockets:
            each.close()
        raise cannot_listen(error, host, port) from error
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Otherwise "::" would take the port of "0.0.0.0", too.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    """The error of a socket in words of the config."""
    match error.errno:
        case errno.EADDRINUSE:
            return ConfigError(f"port {port} of host {host} is in use")
        case errno.EACCES | errno.EPERM:
            return ConfigError(f"port {port} of host {host} may not be used: {error.strerror}")
        case errno.EADDRNOTAVAIL:
            return ConfigError(f"host {host} is not an address of this machine")
        case _:
            return ConfigError(f"cannot listen on port {port} of host {host}: {error.strerror or error}")


def connection_limit(wanted: int | None, others: int = 0) -> int:
    """The number of connections that may be open at once; ``wanted`` is ``max_connections`` of the config,
    ``others`` those of other sockets.

    Fewer than ``wanted`` if the limit of open files leaves fewer, which is logged. Raises ConfigError if it
    leaves none.
    """
    most = wanted or _DEFAULT_CONNECTIONS
    files, opened = file_limit(), open_files()
    if files is None or opened is None:
        return most
    left = files - opened - _SPARE_FILES - others
    if left < 1:
        raise ConfigError(
            f"the limit of open files (ulimit -n {files}) leaves none for connections: at least "
            f"{files - left + 1} are needed"
        )
    if wanted is not None and wanted > left:
        _log.warning("max_connections is %d, not %d: the limit of open files is %d", left, wanted, files)
    return min(most, left)
