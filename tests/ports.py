"""Ports for programs that cannot say which one they were given."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]


def free_port() -> int:
    """One on loopback that the system gives nobody who asks for any: it would have given away again one that
    was asked for and closed. (Ray's workers have those below 20,000.)"""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are in use")
