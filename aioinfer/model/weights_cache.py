"""WeightsCache: the packed weights of a model in a file of the user's cache, which later starts map.

    blobs, each from a multiple of 4096 bytes on | index, JSON | its offset, a checksum of all of it, magic

A file serves one checkpoint, one rounding and one library of kernels; their identities are in its name.
Processes that map it share its memory. A file that was cut or damaged is recognised by the checksum and
written anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self, TypeVar

import numpy as np

from aioinfer.ledger import Share
from aioinfer.model.spec import Progress
from aioinfer.native.bindings import InvalidArguments, ThreadPool
from aioinfer.native.trust import check_folder, make_folder, open_trusted
from aioinfer.native.turns import turn
from aioinfer.system.files import will_be_read
from aioinfer.system.locks import lock

__all__ = [
    *("MappedMemory", "PackedWeightsFile", "WeightsCache", "WeightsWriter"),
    *("UNUSED", "hash_of", "own_code"),
]

_log = logging.getLogger("aioinfer")
#: blobs begin at multiples of this, a page
_ALIGNMENT = 4096
#: at the end: the index's offset, the checksum of all before this, and the kind of the file
_TRAILER = struct.Struct("<QQ8s")
_MAGIC = b"aioinfW1"
#: the names of files that are being written
_UNFINISHED = ".writing-"
#: seconds after which such a file, if no process has locked it, is one that a process left when it was killed
_STALE = 60.0
#: seconds without use after which a file is removed
UNUSED = 30 * 86400.0

#: bytes of which a checksum is computed at a time, so that other engines' steps come in between
_SLICE = 64 << 20

_Model = TypeVar("_Model")


class _Unusable(Exception):
    """The file cannot be used."""


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Packed weights in a mapped file, which lives as long as its owner."""

    address: int
    #: bytes
    size: int
    owner: object
    #: of weights that were quantised before they were packed, how their scales are stored
    factors: int = -1


class Blobs(Protocol):
    """A store of packed weights, by name."""

    def find(self, name: str) -> MappedMemory | None:
        """The blob of this name; None if it is to be made and added."""

    def add(self, name: str, address: int, size: int, factors: int = -1) -> None:
        """Leave a blob: its memory is copied. ``factors``: see :class:`MappedMemory`."""


class PackedWeightsFile:
    """A whole file, mapped for reading."""

    def __init__(self, path: Path, pool: ThreadPool, progress: Progress | None = None) -> None:
        """Raise OSError if it cannot be read, NotTrusted if others could have written it, _Unusable if it was
        cut or damaged, and the exceptions of ``progress``, which is called while all of it is read."""
        with open(open_trusted(path), "rb") as file:
            will_be_read(file.fileno())
            stat = os.fstat(file.fileno())
            size = stat.st_size
            if size <= _TRAILER.size:
                raise _Unusable("it has no contents")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        self._address = memory.ctypes.data
        # They count as free, and would be read again in every step if others took their memory.
        share = Share("mapped weights", size, key=(stat.st_dev, stat.st_ino))
        #: keeps the mapping, and its place in the ledger
        self._owner = memory, share
        end = size - _TRAILER.size
        start, checksum, magic = _TRAILER.unpack(mapped[end:])
        if magic != _MAGIC or start > end or _checksum(pool, self._address, end, progress) != checksum:
            raise _Unusable("it was cut or damaged")
        self._index: dict[str, tuple[int, int, int]] = json.loads(mapped[start:end])

    def find(self, name: str) -> MappedMemory:
        """Raises _Unusable."""
        found = self._index.get(name)
        if found is None:
            raise _Unusable(f"it has no {name}")
        offset, size, factors = found
        return MappedMemory(self._address + offset, size, self._owner, factors)

    def add(self, name: str, address: int, size: int, factors: int = -1) -> None:
        """Do nothing: the file is complete."""


class WeightsWriter:
    """Writes a file under another name, and gives it its own when it is complete.

    An error of the file system ends the writing, not the start of the engine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: dict[str, tuple[int, int, int]] = {}
        #: reason why there will be no file
        self.failed: OSError | None = None
        self._file: IO[bytes] | None = None
        self._name = ""
        try:
            make_folder(path.parent)
            opened, self._name = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
            self._file = os.fdopen(opened, "w+b")
            with suppress(OSError):  # a file system without locks
                # Until it is closed: see _remove_unfinished.
                lock(opened)
        except OSError as error:
            self.failed = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._give_up()

    def find(self, name: str) -> None:
        """Find nothing: the file is empty."""

    def add(self, name: str, address: int, size: int, factors: int = -1) -> None:
        if self._file is None:
            return
        assert name not in self._index, f"two blobs are called {name}"
        try:
            start = -self._file.tell() % _ALIGNMENT + self._file.tell()
            self._file.seek(start)
            self._file.write((ctypes.c_char * size).from_address(address))
        except OSError as error:
            self._give_up(error)
            return
        self._index[name] = start, size, factors

    def commit(self, pool: ThreadPool, progress: Progress | None = None) -> bool:
        """Complete the file and give it its name. False if that failed. Raises what ``progress`` raises."""
        if self._file is None:
            return False
        try:
            start, index = self._file.tell(), json.dumps(self._index).encode()
            self._file.write(index)
            self._file.flush()
            end = start + len(index)
            mapped = mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_READ)
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            checksum = _checksum(pool, address, end, progress)
            self._file.write(_TRAILER.pack(start, checksum, _MAGIC))
            self._file.close()
            # The disk may have it later: after a crash of the system the checksum tells whether it has.
            os.replace(self._name, self._path)
        except OSError as error:
            self._give_up(error)
            return False
        self._file = None
        return True

    def _give_up(self, error: OSError | None = None) -> None:
        self.failed = self.failed or error
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                Path(self._name).unlink()


class WeightsCache:
    """The file of one model."""

    def __init__(self, directory: Path, model: Path, files: Iterable[Path], *facts: object) -> None:
        """
        Args:
            directory: of the cache.
            model: directory of the model; a file replaces others of the same directory, facts and kernels.
            files: in it, what the weights depend on.
            facts: what else they depend on: type, rounding, backends.
        """
        self._group = hash_of(str(model.resolve()), *facts)
        stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in files]
        self._state = hash_of(stats, own_code())
        self._directory = directory

    def load(
        self,
        pool: ThreadPool,
        build: Callable[[Blobs | None], _Model],
        progress: Progress | None = None,
    ) -> tuple[_Model, str]:
        """A model over mapped weights; they are written first if that has not been done.

        Args:
            build: makes the model from its blobs; None: without a cache.
            progress: called while a file is checked; what it raises is raised here.

        Returns:
            The model, and what was done, in words.
        """
        group = f"weights-{self._group}-{hash_of(pool.kernels.name)}-"
        path = self._directory / f"{group}{self._state}.packed"
        mapped = partial(self._mapped, path, pool, build, progress)
        try:
            with suppress(FileNotFoundError):
                check_folder(self._directory)
        except OSError as error:
            return build(None), self._uncached(error)
        self._prune(path, group)
        before, done = _identity(path), "weights are mapped from the cache"
        if (found := mapped()) is not None:
            return found, done
        pulse = None if progress is None else lambda: progress("weights", 0, 1)
        with turn(path.with_name(f"{_UNFINISHED}{path.stem}"), pulse):
            # What another process has written meanwhile is shared with it.
            if _identity(path) != before and (found := mapped()) is not None:
                return found, done
            _log.info("packed weights are written to %s, once for this processor", path)
            with WeightsWriter(path) as writer:
                built = build(writer)
                written = writer.commit(pool, progress)
            if not written:
                return built, self._uncached(writer.failed)
            # Not both at once: what is not in the file takes memory of its own.
            del built
            self._prune(path, group)
            found = mapped()
            if found is None:
                return build(None), "weights were cached"
            return found, "weights were cached and mapped"

    def _uncached(self, reason: OSError | None) -> str:
        """Log why nothing is cached; what was done, in words."""
        _log.warning("packed weights cannot be cached: %s", reason)
        return f"weights could not be cached: {reason}"

    def _mapped(
        self,
        path: Path,
        pool: ThreadPool,
        build: Callable[[Blobs | None], _Model],
        progress: Progress | None,
    ) -> _Model | None:
        with suppress(OSError):  # of root, or not to be written
            os.utime(path)  # the time of its last use, see _prune
        try:
            file = PackedWeightsFile(path, pool, progress)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, _Unusable) as error:
            _log.warning("the packed weights in %s are made anew: %s", path, error)
            return None
        try:
            return build(file)
        except (InvalidArguments, _Unusable) as error:
            _log.warning("the packed weights in %s are made anew: %s", path, error)
            return None

    def _prune(self, path: Path, group: str) -> None:
        """Remove files that ``path`` has replaced, that were not used for long, or that were never completed.

        A process that has mapped a file keeps it.
        """
        now, whole = time.time(), path.exists()
        for other in self._directory.glob("weights-*.packed"):
            with suppress(OSError):
                replaced = whole and other.name.startswith(group) and other != path
                if replaced or now - other.stat().st_mtime > UNUSED:
                    other.unlink()
        for other in self._directory.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if now - other.stat().st_mtime > _STALE:
                    _remove_unfinished(other)


def _identity(path: Path) -> tuple[int, int] | None:
    """Identity of the file of this name, if there is one."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_size
    return None


def _remove_unfinished(path: Path) -> None:
    """Raise OSError if another process is writing it."""
    with path.open("rb") as file:
        lock(file.fileno())
        path.unlink()


def _checksum(pool: ThreadPool, address: int, size: int, progress: Progress | None) -> int:
    found = size
    for at in range(0, size, _SLICE):
        if progress is not None:
            progress("weights", at, size)
        part = pool.checksum(address + at, min(_SLICE, size - at))
        found = int.from_bytes(hashlib.sha256(f"{found} {part}".encode()).digest()[:8], "big")
    return found


@functools.cache
def own_code() -> str:
    """A hash of the code that reads checkpoints, and decides which tensors are packed and in which order."""
    digest = hashlib.sha256()
    model = Path(__file__).parent
    for folder in (model, model.parent / "checkpoint"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def hash_of(*parts: Any) -> str:
    """For names of files."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
