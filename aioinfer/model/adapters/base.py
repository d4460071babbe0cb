"""AdapterSlots: the interface between a model and the adapters that are loaded into it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

__all__ = ["AdapterSlots", "PreparedAdapter"]


class PreparedAdapter(Protocol):
    """An adapter that was read from its files and checked, in the form that kernels read."""

    @property
    def rank(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class AdapterSlots(Protocol):
    """The adapters of one model, by slot: 1 to the number of slots. 0 stands for none."""

    def prepare(self, path: Path) -> PreparedAdapter:
        """Read an adapter. On any thread but the launch thread; may take long. Raises ConfigError, which
        names the tensor or field."""

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Put an adapter into a slot. On the launch thread, between two steps; takes microseconds."""

    def remove(self, slot: int) -> None:
        """Empty a slot. As :meth:`install`."""
