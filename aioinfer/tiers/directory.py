"""DirectoryStore: pages in a directory that processes share, one file each.

::

    3f/3f0c...9a.p            a page: its name in 32 digits, in one of 256 folders
    3f/3f0c...9a.s            the recurrent state behind it
    writing-<id>/, .lock      what a process writes before it is whole (folder.py)

A file gets its name when it is whole, and is never changed. Nothing is synced: what a power failure cuts is
found by its checksum. Each process has an index of the files in memory. What others have written and removed
it learns in ``refresh``, and when it reads a file that is or is not there.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from aioinfer.errors import ConfigError
from aioinfer.tiers.folder import DIRECTORY, SUBFOLDERS, Folder
from aioinfer.tiers.records import HEADER, Descriptor, read_record, write_record
from aioinfer.tiers.store import BaseStore, Views, size_of

__all__ = ["DirectoryStore"]

_FILE = re.compile(r"([0-9a-f]{32})\.([ps])")
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
#: neither through a link nor waiting for the other end of a pipe
_READ = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW
#: a file that is read has its time of last change set to now, unless that is younger than these
#: nanoseconds
_FRESH = 60 * 10**9
#: a folder that changed less than these nanoseconds ago may change again without another time
_SETTLED = 2 * 10**9
#: of the bound, what this process writes before it looks at what others have written
_UNSEEN = 16
#: puts that are skipped after failures, at most
_LONGEST_PAUSE = 1024
#: faults of a file that is no page that can ever be read
_USELESS = frozenset({"damaged", "size", "version"})
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryStore(BaseStore):
    """Pages in files. What was used least recently, by any process, goes first."""

    def __init__(
        self, path: str | os.PathLike[str], max_bytes: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the directory, or make it, and read its index. Blocks: about 10 us for each file.

        Args:
            path: the directory and its files are this user's alone. One that others have rights in is taken
                over if it is empty.
            max_bytes: of all files. While ``n`` other processes write, ``n`` sixteenths more for a while.
            clock: seconds since the epoch, as the file system has them.

        Raises ConfigError: the directory cannot be opened or made, is another user's or open to others, or is
        a link.
        """
        self._path = os.path.abspath(path)
        super().__init__(f"the page store {self._path}")
        self._max_bytes = max_bytes
        self._clock = clock
        self._opened: Folder | None = Folder(self._path, make=True)
        #: by key, size and time of last change in nanoseconds; least recently used first
        self._index: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        #: bytes of what is in the index, and of what is being written
        self._bytes = 0
        self._unseen = 0
        self._failures = self._pause = 0
        self._numbers = itertools.count()
        #: held over calls that block: one refresh at a time
        self._refreshing = threading.Lock()
        #: by subfolder, when it had changed last at its last scan
        self._scanned: dict[str, int] = {}
        self.refresh()

    # -- reading ------------------------------------------------------------------------------------------

    def _has(self, key: bytes) -> bool:
        return key in self._index

    def _read(self, key: bytes, views: Views) -> str:
        folder = self._folder
        try:
            opened = Descriptor(os.open(_file(key), _READ, dir_fd=folder.fd))
            status = os.fstat(opened.number)
            fault = "" if _is_own(status) else "owner"
            fault = fault or read_record(opened.number, 0, status.st_size, key, views)
        except OSError as error:
            known = self._drop(key)
            if error.errno == errno.ENOENT:
                return "vanished" if known else "absent"
            raise
        if not fault:
            self._used(key, status, opened.number)
            return ""
        if fault in _USELESS:
            with suppress(OSError):
                self._forget(key)
        self._drop(key)
        return fault

    def _forget(self, key: bytes) -> None:
        self._drop(key)
        os.unlink(_file(key), dir_fd=self._folder.fd)

    def _used(self, key: bytes, status: os.stat_result, file: int) -> None:
        stamp, now = status.st_mtime_ns, int(self._clock() * 1e9)
        if now - stamp > _FRESH:
            with suppress(OSError):  # a file system for reading only
                os.utime(file, ns=(now, now))
                stamp = now
        self._keep(key, status.st_size, stamp)

    # -- writing ------------------------------------------------------------------------------------------

    def _put(self, key: bytes, views: Views) -> str:
        if key in self._index and self._touch(key):
            return ""
        with self._lock:
            if self._pause:
                self._pause -= 1
                return "paused"
        size = HEADER + size_of(views)
        if self._unseen + size > self._max_bytes // _UNSEEN:
            self.refresh()
        if fault := self._reserve(size):
            return fault
        try:
            stamp = self._write(key, views)
        except OSError as error:
            self._failed(size, error)
            raise
        with self._lock:
            self._bytes -= size
            self._unseen += size
            self._failures = 0
        self._keep(key, size, stamp)
        self._wrote(key, size - HEADER)
        return ""

    def _touch(self, key: bytes) -> bool:
        """Count a file as used now; False: it is not there any more."""
        now = int(self._clock() * 1e9)
        try:
            os.utime(_file(key), ns=(now, now), dir_fd=self._folder.fd, follow_symlinks=False)
        except FileNotFoundError:
            self._drop(key)
            return False
        except OSError:
            now = 0  # it is there, in a file system for reading only
        with self._lock:
            if (found := self._index.pop(key, None)) is not None:
                self._index[key] = found[0], now or found[1]
        return True

    def _write(self, key: bytes, views: Views) -> int:
        """Write a file, and give it its name; when it was changed last. Raises OSError."""
        try:
            return self._write_once(key, views)
        except FileNotFoundError:
            # The place was removed, or the directory, which may be there again. One that is not is not made:
            # where a disk was mounted there is nothing to fill.
            if not self._folder.is_current():
                self._reopen()
            return self._write_once(key, views)

    def _write_once(self, key: bytes, views: Views) -> int:
        folder = self._folder
        place = folder.place()
        temporary = f"{place}/{next(self._numbers)}"
        try:
            opened = Descriptor(os.open(temporary, _WRITE, 0o600, dir_fd=folder.fd))
        except FileNotFoundError:
            folder.forget_place(place)
            raise
        try:
            write_record(opened.number, 0, key, views)
            stamp = os.fstat(opened.number).st_mtime_ns
            name = _file(key)
            try:
                os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name[:2], 0o700, dir_fd=folder.fd)
                os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder.fd)
            raise
        return stamp

    def _failed(self, size: int, error: OSError) -> None:
        """Skip some puts, more of them after every failure; of a full disk the oldest files go."""
        with self._lock:
            self._bytes -= size
            self._failures += 1
            self._pause = min(1 << self._failures, _LONGEST_PAUSE) - 1
        if error.errno in _FULL:
            with suppress(OSError):
                self._evict(size)

    # -- the bound ----------------------------------------------------------------------------------------

    def _reserve(self, size: int) -> str:
        """Take room for a file; why that could not be done, "" if it was. Raises OSError."""
        if size > self._max_bytes:
            return "too large"
        while True:
            with self._lock:
                over = self._bytes + size - self._max_bytes
                if over <= 0:
                    self._bytes += size
                    return ""
            if not self._evict(over):
                return "full"

    def _evict(self, size: int) -> int:
        """Remove the oldest files, until that many bytes are free or none is left; how many were. Raises
        OSError."""
        freed = 0
        for _ in range(2 * len(self._index)):
            if freed >= size:
                break
            with self._lock:
                if not self._index:
                    break
                key, (held, stamp) = self._index.popitem(last=False)
                self._bytes -= held
            try:
                status = os.stat(_file(key), dir_fd=self._folder.fd, follow_symlinks=False)
                if status.st_mtime_ns > stamp:  # another process has used it
                    self._keep(key, held, status.st_mtime_ns)
                    continue
                os.unlink(_file(key), dir_fd=self._folder.fd)
                with self._lock:
                    self._evicted += 1
            except FileNotFoundError:
                pass
            except OSError:
                self._keep(key, held, stamp)
                raise
            freed += held
        return freed

    def close(self) -> None:
        super().close()
        self._opened = None

    @property
    def _folder(self) -> Folder:
        """Raises FileNotFoundError: it was closed."""
        if (folder := self._opened) is None:
            raise FileNotFoundError(errno.ENOENT, "the store was closed")
        return folder

    # -- the index ----------------------------------------------------------------------------------------

    def _held(self) -> tuple[int, int]:
        with self._lock:
            return len(self._index), self._bytes

    def _keep(self, key: bytes, size: int, stamp: int) -> None:
        """Have a file in the index, as the one that was used last."""
        with self._lock:
            before, _ = self._index.pop(key, (0, 0))
            self._index[key] = size, stamp
            self._bytes += size - before

    def _drop(self, key: bytes) -> bool:
        """Take a file out of the index; whether it was there."""
        with self._lock:
            size, _ = self._index.pop(key, (0, 0))
            self._bytes -= size
            return size > 0

    def refresh(self, names: Sequence[bytes] | None = None, *, states: bool = False) -> None:
        """Look at the folders that have changed, or at single pages; remove what killed processes have left,
        and what is beyond the bound. A directory that was replaced is opened anew."""
        if self._closed:
            return
        if names is not None:
            for name in names:
                if not self._probe(name, b"ps" if states else b"p"):
                    break
            return
        with self._refreshing, suppress(OSError):
            self._unseen = 0
            if not self._folder.is_current():
                self._reopen()
            self._folder.sweep()
            self._scan()
            if self._bytes > self._max_bytes:
                self._evict(self._bytes - self._max_bytes)

    def _probe(self, name: bytes, kinds: bytes) -> bool:
        """Look for the files of a page that the index does not have; whether there is a page."""
        for key in (name + bytes((kind,)) for kind in kinds):
            if key not in self._index:
                with suppress(OSError):
                    status = os.stat(_file(key), dir_fd=self._folder.fd, follow_symlinks=False)
                    if _is_own(status):
                        self._keep(key, status.st_size, status.st_mtime_ns)
        return self.has(name)

    def _reopen(self) -> None:
        """Open what the path names now. Raises FileNotFoundError: nothing, or nothing that may be used."""
        with self._lock:
            self._bytes -= sum(size for size, _ in self._index.values())
            self._index.clear()
            self._scanned.clear()
            self._unseen = self._max_bytes
        try:
            self._opened = Folder(self._path, make=False)
        except ConfigError as error:
            self._say(str(error), "no page is kept")
            raise FileNotFoundError(errno.ENOENT, str(error)) from error
        with self._lock:
            self._failures = self._pause = 0

    def _scan(self) -> None:
        """Bring the index up to the files of the folders that have changed. Raises OSError."""
        folder = self._folder
        changed = set[bytes]()
        found = dict[bytes, tuple[int, int]]()
        for name in SUBFOLDERS:
            try:
                opened = Descriptor(os.open(name, DIRECTORY, dir_fd=folder.fd))
                status = os.fstat(opened.number)
                if self._scanned.get(name) == status.st_mtime_ns:
                    continue
                found.update(_files(opened.number, name))
            except OSError:
                pass  # not there yet, or not any more, or not to be read
            else:
                settled = int(self._clock() * 1e9) - status.st_mtime_ns > _SETTLED
                self._scanned[name] = status.st_mtime_ns if settled else 0
            changed.add(bytes.fromhex(name))
        if not changed:
            return
        with self._lock:
            for key in [key for key in self._index if key[:1] in changed and key not in found]:
                self._bytes -= self._index.pop(key)[0]
            new = [(stamp, key, size) for key, (size, stamp) in found.items() if key not in self._index]
            for stamp, key, size in sorted(new):
                self._index[key] = size, stamp
                self._bytes += size


def _file(key: bytes) -> str:
    """The path of a record's file, relative to the directory."""
    name = key[:16].hex()
    return f"{name[:2]}/{name}.{key[16:].decode()}"


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _files(folder: int, digits: str) -> Iterable[tuple[bytes, tuple[int, int]]]:
    """Keys of the files of a subfolder, with their sizes and times. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _FILE.fullmatch(entry.name)
            if match is None or not entry.name.startswith(digits):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if _is_own(status):
                    yield bytes.fromhex(match[1]) + match[2].encode(), (status.st_size, status.st_mtime_ns)
