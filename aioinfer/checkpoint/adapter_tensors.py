"""The tensors of a small safetensors file, in memory of their own.

The file is copied before the library maps it: a mapped file that is written anew while it is read ends the
process, and the library's other function copies all of it under the interpreter's lock.
"""

from __future__ import annotations

import hashlib
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from aioinfer.checkpoint.regular import open_regular
from aioinfer.errors import ConfigError, shown
from aioinfer.system.files import memory_file
from aioinfer.system.low_priority import at_low_priority

if TYPE_CHECKING:
    import torch

__all__ = ["TensorFile", "read_tensors"]

#: bytes that are copied at a time, and those of the longest header
_PIECE = 1 << 20
_LONGEST_HEADER = 16 << 20
#: characters
_LONGEST_NAME = 300
_TYPES = ("float32", "bfloat16", "float16")


class TensorFile(NamedTuple):
    """The contents of a file."""

    #: by name; all numbers are finite
    tensors: dict[str, torch.Tensor]
    #: SHA-256 of all bytes
    digest: bytes


def read_tensors(file: Path, most_bytes: int) -> TensorFile:
    """All tensors of a file. Raises ConfigError that names the file, and the tensor if it is one's."""
    from safetensors import SafetensorError, safe_open

    try:
        opened, size = open_regular(file, most_bytes)
        with opened, memory_file("adapter") as copy:
            digest = at_low_priority(partial(_copy, opened, copy, size))
            # A mapping outlives its file.
            with safe_open(f"/dev/fd/{copy.fileno()}", framework="pt") as found:
                names = found.keys()
                tensors: dict[str, torch.Tensor] = {name: found.get_tensor(name) for name in names}
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"adapter: {file.name} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise ConfigError(f"adapter: {shown(name)} is no name of a tensor")
        if kind not in _TYPES:
            raise ConfigError(f"adapter: {name} holds {kind}; {', '.join(_TYPES)} are supported")
    broken = at_low_priority(partial(_not_finite, tensors))
    if broken is not None:
        raise ConfigError(f"adapter: {broken} has numbers that are not finite")
    return TensorFile(tensors, digest)


def _copy(opened: FileIO, copy: BinaryIO, size: int) -> bytes:
    """Copy a file of this size; its digest. Raises ValueError."""
    digest, piece, left = hashlib.sha256(), memoryview(bytearray(_PIECE)), size
    while left:
        count = opened.readinto(piece[: min(_PIECE, left)])
        if not count:
            raise ValueError("it is cut off")
        if left == size and (header := int.from_bytes(piece[:8], "little")) > _LONGEST_HEADER:
            raise ValueError(f"its header has {header} bytes; {_LONGEST_HEADER} are the most that are read")
        digest.update(piece[:count])
        copy.write(piece[:count])
        left -= count
    return digest.digest()


def _not_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with numbers that are not finite."""
    for name, tensor in tensors.items():
        # NaN is both the least and the largest of any numbers.
        if tensor.numel() and not all(bool(each.isfinite()) for each in tensor.aminmax()):
            return name
    return None
