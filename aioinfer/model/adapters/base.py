"""AdapterSlots: the interface between the kernels of adapters and the rest of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

__all__ = ["AdapterSlots", "PreparedAdapter"]


class PreparedAdapter(Protocol):
    """An adapter made of files, checked, in the form that kernels read."""

    @property
    def rank(self) -> int:
        """The largest of its layers."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes on the model's device."""

    @property
    def fingerprint(self) -> str:
        """Hash of the files from which it was read."""


class AdapterSlots(Protocol):
    """The adapters of a model by the slots that rows name, from 1 on; 0 is none."""

    def prepare(self, path: Path) -> PreparedAdapter:
        """Read, check and convert an adapter in a directory. Any thread but the launch thread: it may take
        long. Raises ConfigError that names the tensor or field that is wrong."""

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Have the rows of ``slot`` computed with an adapter. On the launch thread, between two steps; takes
        microseconds."""

    def replace_weights(self) -> None:
        """The model gets other weights. Raises ConfigError: an adapter was made of those that it has."""

    def remove(self, slot: int) -> None:
        """Empty a slot that no row names any more. On the launch thread, between two steps. The memory is
        freed with the last reference to the adapter."""
