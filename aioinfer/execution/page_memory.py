"""PageMemory: the bytes of KV pages and of recurrent states, as they lie in the memory of the host.

No torch call touches them, so that any thread may copy them while steps compute: see
:meth:`~aioinfer.execution.device.HostPages.page_views` for who may do that when.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["PageMemory"]


class PageMemory:
    """``pages`` and ``states``: tensors whose first dimension counts pages, or cells."""

    __slots__ = ("_pages", "_states", "layout", "page_bytes", "state_bytes")

    def __init__(self, kind: str, pages: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()) -> None:
        """``kind``: names the order of the numbers within a page."""
        self._pages = [_rows(tensor) for tensor in pages]
        self._states = [_rows(tensor) for tensor in states]
        #: of one page, and of one cell of recurrent state
        self.page_bytes = sum(size for _, size in self._pages)
        self.state_bytes = sum(size for _, size in self._states)
        #: what has the same text can be copied byte by byte
        shapes = [f"{list(tensor.shape[1:])} {tensor.dtype}" for tensor in (*pages, *states)]
        self.layout = "; ".join([kind, *shapes])

    def page_views(self, page: int) -> list[memoryview]:
        return [memory[page * size : (page + 1) * size] for memory, size in self._pages]

    def state_views(self, cell: int) -> list[memoryview]:
        return [memory[cell * size : (cell + 1) * size] for memory, size in self._states]


def _rows(tensor: torch.Tensor) -> tuple[memoryview, int]:
    """The bytes of a tensor, and those of each item of its first dimension."""
    memory = tensor.view(-1).view(torch.uint8).numpy().data
    return memory, len(memory) // len(tensor)
