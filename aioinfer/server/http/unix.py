"""Unix sockets to listen on: a path that one process holds at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from aioinfer.errors import ConfigError
from aioinfer.system.locks import lock_file
from aioinfer.system.sockets import LONGEST_UNIX_PATH, has_unix_sockets

__all__ = ["UnixSocket"]


class UnixSocket:
    """A bound Unix socket, not yet listening, and the lock that says whose it is.

    A killed process leaves a socket on which nothing listens, as on that of a server that still loads its
    model. So a socket belongs to the holder of a lock on ``PATH.lock``, which ends with the process.
    """

    def __init__(self, path: str, mode: int) -> None:
        """``mode``: permissions of the file; who may write may connect. Raises ConfigError."""
        self.path = path
        if not has_unix_sockets():
            raise ConfigError("Unix sockets do not exist on this system")
        if len(os.fsencode(path)) > LONGEST_UNIX_PATH:
            raise ConfigError(f"the socket {path[:80]}... has a path of more than {LONGEST_UNIX_PATH} bytes")
        try:
            self._lock = lock_file(f"{path}.lock")
        except BlockingIOError:
            raise ConfigError(f"the socket {path} is in use") from None
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            _remove_stale(path)
            self.socket = _bound(path, mode)
            found = os.lstat(path)
        except OSError as error:
            self._unlock()
            raise _unusable(path, error) from error
        except BaseException:
            self._unlock()
            raise
        self._file = found.st_dev, found.st_ino

    def close(self) -> None:
        """Close the socket and remove its files, unless another process has replaced them. Idempotent."""
        self.socket.close()
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._file:
                os.unlink(self.path)
        self._unlock()

    def _unlock(self) -> None:
        # Removed while it is held: a process that has opened it meanwhile sees that it is no longer there.
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.lock")
        os.close(self._lock)
        self._lock = -1


def _remove_stale(path: str) -> None:
    """Remove a socket on which nothing listens. Raises ConfigError for any other file, OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog would wait; it is in use, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"the socket {path} is in use")


def _bound(path: str, mode: int) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        bound.bind(path)
        # It cannot be connected to before it listens: the permissions are set by then.
        os.chmod(path, mode)
    except BaseException:
        bound.close()
        raise
    return bound


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on the socket {path}: {error.strerror or error}")
