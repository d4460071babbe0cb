"""The tensors of a small safetensors file, read into memory of their own.

Mapped, as safetensors' own reader has them, a file that is written anew while it is read ends the process;
read by its other function, all of it is copied under the interpreter's lock, and every other thread waits.
The format: 8 bytes with the length of a JSON header, the header, and the numbers of all tensors, for each of
which the header has a type, a shape and a place.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.regular import open_regular
from aioinfer.errors import ConfigError, shown
from aioinfer.low_priority import at_low_priority

if TYPE_CHECKING:
    import torch

__all__ = ["TensorFile", "read_tensors"]

_LENGTH = 8
_LONGEST_HEADER = 16 << 20
#: characters
_LONGEST_NAME = 300


class _Type(NamedTuple):
    """A supported type."""

    #: in torch
    name: str
    #: of its bits
    bits: type[np.unsignedinteger[Any]]
    #: all of these are set in what is not finite, and in nothing else
    exponent: int


#: by their names in a file
_TYPES = {
    "F32": _Type("float32", np.uint32, 0x7F800000),
    "BF16": _Type("bfloat16", np.uint16, 0x7F80),
    "F16": _Type("float16", np.uint16, 0x7C00),
}
#: numbers that are looked at together
_PIECE = 1 << 18


class TensorFile(NamedTuple):
    """The contents of a file."""

    #: by name; all numbers are finite
    tensors: dict[str, torch.Tensor]
    #: of all bytes, SHA-256
    digest: bytes


def read_tensors(file: Path, most_bytes: int) -> TensorFile:
    """All tensors of a file. Raises ConfigError that names the file, and the tensor if it is one's."""
    import torch

    try:
        opened, size = open_regular(file, most_bytes)
        with opened:
            buffer = np.empty(size, np.uint8)
            content = buffer.data
            digest = at_low_priority(partial(_read_all, opened, content))
        start, header = _header(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"adapter: {file.name} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    numbers = buffer[start:]
    entries = {name: _entry(len(numbers), name, entry) for name, entry in header.items()}
    _check_finite(numbers, entries)
    memory = torch.from_numpy(numbers)
    return TensorFile({name: _tensor(memory, entry) for name, entry in entries.items()}, digest)


def _read_all(opened: Any, content: memoryview) -> bytes:
    """Read a file to its end, into what is as large. Raises ValueError."""
    at = 0
    while at < len(content):
        count = opened.readinto(content[at:])
        if not count:
            raise ValueError("it is cut off")
        at += count
    return hashlib.sha256(content).digest()


def _header(content: memoryview) -> tuple[int, dict[str, Any]]:
    """Where the numbers begin, and the header. Raises ValueError."""
    length = int.from_bytes(content[:_LENGTH], "little")
    if len(content) < _LENGTH or length > min(_LONGEST_HEADER, len(content) - _LENGTH):
        raise ValueError("it is cut off, or no safetensors file")
    header = json.loads(bytes(content[_LENGTH : _LENGTH + length]))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return _LENGTH + length, header


class _Entry(NamedTuple):
    """The header's entry for a tensor."""

    type: _Type
    shape: list[int]
    #: of its bytes among the numbers
    first: int
    stop: int


def _entry(size: int, name: str, stated: Any) -> _Entry:
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(f"adapter: {shown(name)} is no name of a tensor")
    fields: dict[str, Any] = stated if isinstance(stated, dict) else {}
    stored = fields.get("dtype")
    if not isinstance(stored, str) or stored not in _TYPES:
        supported = ", ".join(each.name for each in _TYPES.values())
        raise ConfigError(f"adapter: {name} holds {shown(stored)}; {supported} are supported")
    kind, shape, place = _TYPES[stored], _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or place is None or len(place) != 2:
        raise ConfigError(f"adapter: {name} has no valid shape and place in its file")
    first, stop = place
    if stop > size or stop - first != math.prod(shape) * np.dtype(kind.bits).itemsize:
        raise ConfigError(f"adapter: {name} is not in its file as a whole")
    return _Entry(kind, shape, first, stop)


def _counts(values: Any) -> list[int] | None:
    """The same if it is a list of integers from 0 on, of a bounded size."""
    valid = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**40 for value in values)
    return values if valid else None


def _check_finite(numbers: npt.NDArray[np.uint8], entries: dict[str, _Entry]) -> None:
    """Raise ConfigError that names a tensor with numbers that are not finite."""
    kinds = {each.type for each in entries.values()}
    if len(kinds) == 1:
        # Together, nearly always: what is between tensors, if anything, is looked at below.
        (kind,) = kinds
        size = len(numbers) - len(numbers) % np.dtype(kind.bits).itemsize
        if at_low_priority(partial(_all_finite, numbers[:size], kind)):
            return
    for name, entry in entries.items():
        if not _all_finite(numbers[entry.first : entry.stop], entry.type):
            raise ConfigError(f"adapter: {name} has numbers that are not finite")


def _all_finite(numbers: npt.NDArray[np.uint8], kind: _Type) -> bool:
    bits, exponent = numbers.view(kind.bits), kind.bits(kind.exponent)
    return not any(
        bool(np.any((bits[at : at + _PIECE] & exponent) == exponent)) for at in range(0, len(bits), _PIECE)
    )


def _tensor(memory: torch.Tensor, entry: _Entry) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, entry.type.name)
    part = memory[entry.first : entry.stop]
    if part.data_ptr() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(entry.shape)
