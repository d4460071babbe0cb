"""Identity of a model: which files it consists of, by what is in them and not by where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from aioinfer.errors import ConfigError

__all__ = ["digest"]

#: bytes that are read of a file's begin, where names and shapes of tensors are, and of further places
_HEAD = 1 << 16
_PLACE = 1 << 12
#: places in a file, at equal distances; the last is its end. And bytes from one to the next at most: less
#: than a matrix has, so that a model with a single other one is told from the rest
_PLACES, _APART = 64, 1 << 20


def digest(files: Iterable[Path]) -> str:
    """16 hexadecimal digits of the files' names, sizes and contents.

    Large files are sampled: a matrix that was trained further differs nearly everywhere. Blocks for
    milliseconds, for a tenth of a second with large models. Raises ConfigError.
    """
    found = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        try:
            size = file.stat().st_size
            found.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                found.update(opened.read(_HEAD))
                places = max(_PLACES, -(-size // _APART))
                for place in range(1, places + 1):
                    at = (size - _PLACE) * place // places
                    if at >= _HEAD:
                        opened.seek(at)
                        found.update(opened.read(_PLACE))
        except OSError as error:
            raise ConfigError(f"model: {file.name} cannot be read: {error.strerror}") from error
    return found.hexdigest()[:16]
