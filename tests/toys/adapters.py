"""ToyAdapters: the slots of a toy's adapters, which tell when a row has another adapter than its request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.scheduling.step import Row
from tests.toys.states import TaintError

__all__ = ["NoAdapters", "ToyAdapter", "ToyAdapters", "write_toy_adapter"]

_FILE = "adapter_config.json"


def write_toy_adapter(directory: Path, content: str, rank: int = 8) -> Path:
    """A directory that a toy device can load; another ``content`` is another adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _FILE).write_text(json.dumps({"r": rank, "content": content}))
    return directory


class ToyAdapter:
    """An adapter of which the content alone matters: ``key`` is its hash, of 62 bits and not 0."""

    def __init__(self, key: int, rank: int, num_bytes: int) -> None:
        self.key = key
        self.rank = rank
        self.num_bytes = num_bytes
        self.fingerprint = f"{key:016x}"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError: there is no adapter."""
        try:
            content = (path / _FILE).read_bytes()
            rank = json.loads(content)["r"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path.name} is no adapter: {error!r}") from error
        if type(rank) is not int or rank < 1:
            raise ConfigError(f"{path.name}: r must be a rank, got {rank!r}")
        key = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 2 | 1
        return cls(key, rank, len(content))


class ToyAdapters:
    """By slot, what is installed; and by slot of a request, what its tenant had when it came."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.installed: dict[int, ToyAdapter] = {}
        self._tenants: dict[int, tuple[int, ToyAdapter | None]] = {}

    def install(self, slot: int, adapter: ToyAdapter) -> None:
        """Raises TaintError: there is no such slot, or it is not empty."""
        if not 1 <= slot <= self._slots or slot in self.installed:
            raise TaintError(f"an adapter cannot be installed in slot {slot}")
        self.installed[slot] = adapter

    def remove(self, slot: int) -> None:
        self.installed.pop(slot, None)

    def enter(self, rows: Sequence[Row]) -> None:
        """New tenants have what is in their slots now."""
        for row in rows:
            if row.new_request is not None:
                slot = row.new_request.adapter
                self._tenants[row.slot] = slot, self.installed.get(slot)

    def check(self, rows: Sequence[Row]) -> None:
        """Raise TaintError unless every row finds the adapter that its request came with."""
        for row in rows:
            slot, adapter = self._tenants.get(row.slot, (0, None))
            if slot and (adapter is None or self.installed.get(slot) is not adapter):
                raise TaintError(f"{row.sequence}: its adapter is not in slot {slot} any more")

    def key(self, slot: int) -> int:
        """Of the adapter that the tenant of a slot came with; 0: it has none."""
        adapter = self._tenants.get(slot, (0, None))[1]
        return 0 if adapter is None else adapter.key


class NoAdapters:
    """The part of a device whose model computes no adapters."""

    def prepare_adapter(self, path: Path) -> PreparedAdapter:
        raise ConfigError("adapters: this device computes none")

    def install_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        raise ConfigError("adapters: this device computes none")

    def remove_adapter(self, slot: int) -> None:
        """There is nothing to remove."""
