"""GGUFFile: the metadata of a GGUF file, and its tensors as they lie there.

    magic, version, counts | metadata: key, type, value ... | tensors: name, sizes, type, offset ... | data

The package ``gguf`` says how blocks are built and dequantises them. Its reader is not used: it makes an
object for every element of a vocabulary, and a file that promises more elements than it has keeps it busy for
ever.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.tensors import check_pointer
from aioinfer.errors import ConfigError

__all__ = ["GGUFFile", "StoredTensor", "parts_of"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: codes of types of metadata
_SCALARS: dict[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
#: the least bytes of a string, of a key with its value, and of what is said of a tensor
_LEAST_STRING, _LEAST_FIELD, _LEAST_TENSOR = 8, 13, 24
_MOST_DIMENSIONS = 4
_CUT = "it was cut, or states sizes beyond its end"
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


class _Malformed(Exception):
    """In words, what is wrong with a file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file."""

    #: a member of ``gguf.GGMLQuantizationType``
    kind: Any
    #: the last size is that of neighbouring elements
    shape: tuple[int, ...]
    #: [rows, bytes of a row], uint8; a view of the mapped file
    data: npt.NDArray[np.uint8]


class GGUFFile:
    """The metadata and tensors of a file, and of its further parts."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if a file cannot be read, or is not whole."""
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.files = parts_of(path)
        for number, file in enumerate(self.files):
            try:
                check_pointer(file)
                metadata, tensors = _read(file)
            except ConfigError:
                raise
            except (OSError, ValueError, _Malformed) as error:
                raise ConfigError(f"model: {file.name} cannot be read as GGUF: {error}") from error
            if number == 0:
                self.metadata = metadata
                _check_parts(file, metadata.get("split.count"), len(self.files))
            if twice := tensors.keys() & self.tensors.keys():
                raise ConfigError(f"model: {file.name} and another part both hold {min(twice)}")
            self.tensors |= tensors

    def value(self, name: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
        """The metadata of a name. Raises ConfigError if it has another type, or is missing without a
        default."""
        found = self.metadata.get(name, default)
        if found is None:
            raise ConfigError(f"model: the GGUF file does not state {name}")
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise ConfigError(f"model: {name} of the GGUF file is {type(found).__name__}")
        return found


def parts_of(path: Path) -> list[Path]:
    """All files of a model of which ``path`` is one, or ``path`` alone. Raises ConfigError if one is
    missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["parts"])
    parts = [path.with_name(f"{match['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ConfigError(f"model: {part.name} is missing beside {path.name}")
    return parts


def _check_parts(file: Path, stated: Any, found: int) -> None:
    """Raise ConfigError for a part of a model that lies alone, or that the others were appended to."""
    if isinstance(stated, int) and stated > 1 and stated != found:
        raise ConfigError(
            f"model: {file.name} is the first of {stated} parts of a model (split.count): all are needed, in "
            f"one directory, as NAME-00001-of-{stated:05}.gguf; llama-gguf-split --merge joins them, not cat"
        )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Raises OSError, ValueError, _Malformed."""
    from gguf import GGUF_DEFAULT_ALIGNMENT

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(mapped)
    if reader.take(4) != _MAGIC:
        raise _Malformed("it does not begin as one")
    version = reader.number("<I")
    if version & 0xFFFF == 0:
        raise _Malformed(
            "it is big-endian, which is not read: gguf-convert-endian of the package gguf turns it"
        )
    if version not in _VERSIONS:
        raise _Malformed(f"its version is {version}, versions {' and '.join(map(str, _VERSIONS))} are read")
    num_tensors, num_fields = reader.number("<Q"), reader.number("<Q")
    reader.expect(num_fields, _LEAST_FIELD, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.text()
        if key in metadata:
            raise _Malformed(f"it states {key} twice")
        metadata[key] = reader.value(reader.number("<I"))
    reader.expect(num_tensors, _LEAST_TENSOR, "tensors")
    stated = [_stated(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment is {alignment}")
    start = -(-reader.at // alignment) * alignment
    data = np.frombuffer(mapped, dtype=np.uint8)
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in stated:
        if name in tensors:
            raise _Malformed(f"it holds {name} twice")
        tensors[name] = _located(data, name, shape, kind, start + offset)
    return metadata, tensors


def _stated(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = reader.text(), reader.number("<I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _Malformed(f"{name} has {dimensions} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(dimensions))
    return name, shape[::-1], reader.number("<I"), reader.number("<Q")


def _located(
    data: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...], code: int, offset: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise _Malformed(f"{name} is of type {code}, which is not known") from None
    elements, size = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % elements:
        raise _Malformed(f"{name} is shaped {shape}, in blocks of {elements}")
    rows, width = math.prod(shape[:-1]), shape[-1] // elements * size
    if offset + rows * width > len(data):
        raise _Malformed(f"{name} lies beyond its end: the file was cut")
    return StoredTensor(kind, shape, data[offset : offset + rows * width].reshape(rows, width))


class _Reader:
    """Reads values one after the other, and nothing beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.at = 0

    def take(self, size: int) -> bytes:
        """Raises _Malformed."""
        end = self.at + size
        if end > self._size:
            raise _Malformed(_CUT)
        found = self._data[self.at : end]
        self.at = end
        return found

    def expect(self, count: int, size: int, what: str) -> None:
        """Raise _Malformed if ``count`` things of at least ``size`` bytes cannot follow."""
        if count * size > self._size - self.at:
            raise _Malformed(f"it states {count} {what} and has no room for them")

    def number(self, form: str) -> int:
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def text(self) -> str:
        return str(self.take(self.number("<Q")), "utf-8")

    def value(self, code: int) -> Any:
        """A value of metadata; arrays are lists."""
        if code == _STRING:
            return self.text()
        if code == _ARRAY:
            return self._array()
        return self._scalars(code, 1)[0]

    def _array(self) -> list[Any]:
        code, count = self.number("<I"), self.number("<Q")
        if code == _STRING:
            self.expect(count, _LEAST_STRING, "strings")
            return self._texts(count)
        if code == _ARRAY:
            raise _Malformed("arrays of arrays are not read")
        return self._scalars(code, count)

    def _texts(self, count: int) -> list[str]:
        """As :meth:`text` again and again: a vocabulary and its merges are hundreds of thousands."""
        found, data, at, size = [], self._data, self.at, self._size
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:
                raise _Malformed(_CUT)
            found.append(str(data[start:at], "utf-8"))
        self.at = at
        return found

    def _scalars(self, code: int, count: int) -> list[Any]:
        form = _SCALARS.get(code)
        if form is None:
            raise _Malformed(f"a value has type {code}, which is not known")
        kind = np.dtype(form)
        self.expect(count, kind.itemsize, "numbers")
        found: list[Any] = np.frombuffer(self.take(count * kind.itemsize), dtype=kind).tolist()
        return found
