"""Addresses: how a dispatcher reaches what listens elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aioinfer.errors import ConfigError, shown

__all__ = ["PATIENCE", "Connect", "connector"]

#: seconds in which a replica must have answered
PATIENCE = 10.0

#: opens a connection with the protocol that it is given
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[Any]]


def connector(address: str) -> Connect:
    """How to connect to ``HOST:PORT``, or to the path of a Unix socket. Raises ConfigError."""

    async def unix(protocol: Callable[[], asyncio.Protocol]) -> Any:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.get_running_loop().create_unix_connection(protocol, address)

    async def tcp(protocol: Callable[[], asyncio.Protocol]) -> Any:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.get_running_loop().create_connection(protocol, host.strip("[]"), int(port))

    if "/" in address:
        return unix
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"a replica's address must be HOST:PORT or a path, got {shown(address)}")
    return tcp
