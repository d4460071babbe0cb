"""OpenRequest: a request of an engine or a dispatcher, from its acceptance to its end."""

from __future__ import annotations

import asyncio

from aioinfer.cells import StreamCell

__all__ = ["OpenRequest"]


class OpenRequest:
    """A request from its acceptance to its end."""

    __slots__ = ("cell", "least_tokens", "output", "preparing")

    def __init__(self, cell: StreamCell) -> None:
        self.cell = cell
        self.output = cell.output
        #: tokenizes its prompt; None: that is done
        self.preparing: asyncio.Task[None] | None = None
        #: its prompt has at least this many tokens
        self.least_tokens = 0
