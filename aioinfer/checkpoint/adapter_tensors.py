"""The tensors of a small safetensors file, read into memory of their own.

Mapped, as safetensors' own reader has them, a file that is written anew while it is read ends the process;
read by its other function, all of it is copied under the interpreter's lock, and every other thread waits.
The format: 8 bytes with the length of a JSON header, the header, and the numbers of all tensors, for each of
which the header has a type, a shape and a place.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["read_tensors"]

_LENGTH = 8
_LONGEST_HEADER = 16 << 20
#: characters
_LONGEST_NAME = 300
#: supported types, by their names in torch and in a file
_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors by name. Raises ConfigError that names the file, and the tensor if it is one's."""
    import torch

    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            buffer = bytearray(size)
            if size == 0 or opened.readinto(buffer) != size:
                raise ValueError("it is cut off")
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        start, header = _header(memory)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"adapter: {file.name} cannot be read: {error}") from error
    return {
        name: _tensor(memory[start:], name, entry) for name, entry in header.items() if name != "__metadata__"
    }


def _header(memory: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """Where the numbers begin, and the header. Raises ValueError."""
    raw = memory[:_LENGTH].numpy().tobytes()
    length = int.from_bytes(raw, "little")
    if len(raw) < _LENGTH or length > min(_LONGEST_HEADER, len(memory) - _LENGTH):
        raise ValueError("it is cut off, or no safetensors file")
    header = json.loads(memory[_LENGTH : _LENGTH + length].numpy().tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return _LENGTH + length, header


def _tensor(numbers: torch.Tensor, name: str, entry: Any) -> torch.Tensor:
    import torch

    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(f"adapter: {shown(name)} is no name of a tensor")
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    stored = fields.get("dtype")
    if not isinstance(stored, str) or stored not in _TYPES:
        supported = ", ".join(_TYPES.values())
        raise ConfigError(f"adapter: {name} holds {shown(stored)}; {supported} are supported")
    dtype: torch.dtype = getattr(torch, _TYPES[stored])
    shape, place = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or place is None or len(place) != 2:
        raise ConfigError(f"adapter: {name} has no valid shape and place in its file")
    first, stop = place
    if stop > len(numbers) or stop - first != math.prod(shape) * dtype.itemsize:
        raise ConfigError(f"adapter: {name} is not in its file as a whole")
    part = numbers[first:stop]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)


def _counts(values: Any) -> list[int] | None:
    """The same if it is a list of integers from 0 on, of a bounded size."""
    valid = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**40 for value in values)
    return values if valid else None
