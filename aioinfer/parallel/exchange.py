"""Exchange: where the replicas of a dispatcher leave pages of KV for each other.

::

    engines of one process      a store in memory                        MemoryStore
    child processes             a directory in the memory of the host    DirectoryStore
    other hosts, Ray            each has a store of its own; the dispatcher carries pages on (relay)

What is missing there is computed where it is wanted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from aioinfer.errors import ConfigError, shown
from aioinfer.forks import drop_file, this_process
from aioinfer.loop.belonging import end_in_children
from aioinfer.system.locks import lock_file
from aioinfer.tiers.directory import DirectoryStore
from aioinfer.tiers.memory import MemoryStore

if TYPE_CHECKING:
    from aioinfer.engine import Engine
    from aioinfer.tiers.store import PageStore

__all__ = ["Exchange", "ExchangeKind", "check_pages", "checked_gib"]

ExchangeKind: TypeAlias = Literal["memory", "directory", "messages"]

_log = logging.getLogger("aioinfer")

_PREFIX, _LOCK = "aioinfer-pages-", ".lock"
#: its files are memory, and gone when the machine restarts
_SHARED_MEMORY = Path("/dev/shm")


def checked_gib(gib: object) -> float:
    """Raises ConfigError."""
    if type(gib) not in (int, float) or not 0 < gib < math.inf:  # type: ignore[operator]
        raise ConfigError(f"exchange_gib must be a positive number of GiB, got {shown(gib)}")
    return float(gib)  # type: ignore[arg-type]


class Exchange:
    """Of one dispatcher, from :meth:`open` to :meth:`close`. It costs nothing until something is stored."""

    def __init__(self, gib: float, kind: ExchangeKind) -> None:
        self.max_bytes = int(gib * (1 << 30))
        self._kind = kind
        self._store: PageStore | None = None
        #: the directory, while there is one
        self.path: Path | None = None
        #: its lock, and the process that has it
        self._lock: FileIO | None = None
        self._process: object = None

    def open(self, parents: Sequence[Path] | None = None) -> None:
        """Make the directory, where there is to be one, and remove those that killed processes have left.
        Blocks. Raises ConfigError: there is no place for one.

        ``parents``: where it may be, of which the first with enough room is taken, or that with the most. By
        default the memory of the host, and where temporary files are."""
        self.close()
        if self._kind == "memory":
            self._store = MemoryStore(self.max_bytes)
        if self._kind != "directory":
            return
        reasons = []
        places = (_SHARED_MEMORY, Path(tempfile.gettempdir())) if parents is None else parents
        for parent in sorted(places, key=lambda place: -min(_room(place), self.max_bytes)):
            try:
                remove_left(parent)
                self._make(parent / f"{_PREFIX}{secrets.token_hex(8)}")
                return
            except OSError as error:
                reasons.append(str(error))
        raise ConfigError(f"roles: there is no place for pages that replicas exchange: {'; '.join(reasons)}")

    @property
    def by_messages(self) -> bool:
        """The dispatcher carries pages from one replica to another."""
        return self._kind == "messages"

    def _make(self, path: Path) -> None:
        """Raises OSError."""
        self._lock, self._process = FileIO(lock_file(path.with_suffix(_LOCK)), "r+"), this_process()
        end_in_children(self)
        self.path = path
        try:
            path.mkdir(0o700)
        except BaseException:
            self.close()
            raise

    def store(self) -> PageStore | None:
        """The store that an engine of this process looks in; None: there is none. Raises ConfigError."""
        return self._store if self.path is None else DirectoryStore(self.path, self.max_bytes)

    def close(self) -> None:
        """Remove everything; in a child of a fork, nothing. Idempotent."""
        self._store, path, lock = None, self.path, self._lock
        self.path = self._lock = None
        if lock is not None and path is not None:
            if self._process is this_process():
                _remove(path)
            lock.close()

    def forked(self) -> None:
        """In a child of a fork, which would hold the lock when its parent is killed."""
        if self._lock is not None:
            drop_file(self._lock)


def _room(place: Path) -> int:
    """Free bytes."""
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def _remove(path: Path) -> None:
    """Remove a directory, and then its lock, which this process holds."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.with_suffix(_LOCK).unlink()


def remove_left(parent: Path) -> None:
    """Remove the directories of exchanges whose process has ended without that. Raises OSError."""
    for name in parent.glob(f"{_PREFIX}*{_LOCK}"):
        try:
            if name.lstat().st_uid != os.getuid():
                continue
            opened = lock_file(name)
        except OSError:
            continue  # its process lives, or another one removes it
        path = name.with_suffix("")
        if path.exists():
            _log.info("the pages that a killed dispatcher has left in %s are removed", path)
        _remove(path)
        os.close(opened)


def check_pages(engine: Engine) -> None:
    """Raise ConfigError unless the KV pages of an engine can be given to others."""
    if not engine.config.prefix_cache:
        raise ConfigError("roles: an engine without a prefix cache has no pages that another one could use")
    if not engine.info.page_bytes:
        raise ConfigError("roles: KV pages in the memory of a GPU cannot be given to another engine yet")
