"""Tensors of a checkpoint: by name, as they are stored, dequantised, or as whole numbers with factors."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from aioinfer.checkpoint.regular import open_regular, read_regular
from aioinfer.errors import ConfigError, why
from aioinfer.system.files import will_be_read

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOAT4",
    "MOST_JSON",
    "Float8Matrix",
    "QuantisedMatrix",
    "Rounding",
    "SafetensorsTensors",
    "Tensors",
    "check_pointer",
    "read_json_object",
    "stored_bytes",
    "weight_files",
]

#: bytes of a file of JSON: the largest vocabularies have 40 million
MOST_JSON = 1 << 28
#: a file of several, and their number
_PART = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
#: the begin of a pointer of Git LFS
_POINTER = b"version https://git-lfs"
#: of a scale, and of an offset or its place
_FACTOR_BITS = 32
#: groups are multiples of this
_LEAST_GROUP = 32
#: the floats of 4 bits (e2m1: a sign, two bits of exponent, one of fraction), twice as large
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Rounding(NamedTuple):
    """Bits and size of groups."""

    bits: Literal[4, 6, 8]
    #: a multiple of 32, of 6 and 8 bits, or with a table, also of 16; 0: one group
    group: int
    #: of 4 bits: 16 numbers from -127 to 127, at whose places values are; (): values are the numbers
    table: tuple[int, ...] = ()

    @property
    def zero(self) -> int:
        """The number that stands for 0 where there are no offsets."""
        return 0 if self.bits == 8 or self.table else 2 ** (self.bits - 1)

    def for_size(self, inner: int) -> Rounding:
        """This rounding for an inner dimension, with groups halved until they divide it, or have 32 numbers;
        then the last one may be shorter."""
        group = self.group
        while group > _LEAST_GROUP and inner % group:
            group //= 2
        return Rounding(self.bits, group, self.table)


class QuantisedMatrix(NamedTuple):
    """A matrix [rows, inner] of whole numbers: an element is ``scale * value + offset``, or with the number
    of a table that is at the place ``value``."""

    #: [rows, inner], one number a byte: uint8 for 4 and 6 bits, int8 for 8 bits
    values: torch.Tensor
    #: [rows, groups], float32
    scales: torch.Tensor
    #: as ``scales``; None: ``-scale * rounding.zero``
    offsets: torch.Tensor | None
    rounding: Rounding


class Float8Matrix(NamedTuple):
    """A matrix [rows, inner] of floats of 8 bits: an element is its value times the scale of its block. Or a
    stack of such matrices, whose number is one more dimension, the first."""

    #: [rows, inner], float8_e4m3fn
    values: torch.Tensor
    #: [ceil(rows / height), ceil(inner / width)], float32
    scales: torch.Tensor
    #: height and width of a block; those at the edges may be smaller
    block: tuple[int, int]


class Tensors(Protocol):
    """The tensors of a checkpoint under the names that transformers gives them.

    Errors are ConfigErrors that name the tensor and what is wrong with its file.
    """

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is computed with."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the type in which it is stored; float32 if that is quantised. It may be a view of a
        mapped file."""

    def rounding(self, name: str) -> Rounding | None:
        """The quantisation of a matrix, or of the matrices of a stack, if :meth:`quantised` can return them;
        None for anything else."""
        return None

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        """A matrix that has a rounding, as it is stored, [outputs, inner]; ``at``: its number in a stack."""
        raise AssertionError(f"{name} is not quantised")

    def float8(self, name: str) -> Float8Matrix | None:
        """A matrix that is stored as floats of 8 bits, or a stack of such, as it is stored; None for anything
        else."""
        return None


class SafetensorsTensors(Tensors):
    """The tensors of a directory's safetensors files, or of one such file, memory-mapped and read on
    demand."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there are no safetensors, or if a file that their index names is missing."""
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        try:
            for file in [path] if path.suffix == ".safetensors" else weight_files(path):
                check_pointer(file)
                with file.open("rb") as ahead:
                    will_be_read(ahead.fileno())
                opened: Any = safe_open(file, framework="pt", device="cpu")
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except ConfigError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"model: the weights of {path.name} cannot be read: {error}") from error

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return tuple(self._files[name].get_slice(name).get_shape())
        except Exception as error:
            raise _unreadable(name, error) from error

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except Exception as error:
            raise _unreadable(name, error) from error
        return tensor


def stored_bytes(
    tensors: Tensors,
    itemsize: int,
    roundings: Mapping[str, Rounding] = MappingProxyType({}),
    kept: Collection[str] = (),
    mapped: Collection[str] = (),
    small: Collection[str] = (),
) -> int:
    """Bytes that the tensors of a checkpoint take at least.

    Args:
        itemsize: bytes of an element that is not rounded.
        roundings: of tensors that are rounded.
        kept: names of tensors that stay as they are quantised.
        mapped: names of tensors that stay in their file.
        small: names of tensors that are kept as floats of 8 bits.
    """
    bits = 0
    for name in tensors.names:
        if name in mapped:
            continue
        own = roundings.get(name) or (tensors.rounding(name) if name in kept else None)
        count, plain = math.prod(tensors.shape(name)), 8 if name in small else 8 * itemsize
        bits += count * (plain if own is None else own.bits)
        if own is not None and own.group:
            bits += count // own.group * _FACTOR_BITS
    return bits // 8


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: a single one, those that an index names, or all parts
    without an index. Raises ConfigError if there are none, or if one is missing."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if not index.is_file():
        return [single] if single.is_file() else _parts(path, index.name)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise ConfigError(f"model: {index.name} has no weight_map of file names")
    files = [path / name for name in sorted(set(weight_map.values()))]
    if single.is_file() and single not in files:
        # The index is of other files; transformers takes the single one, too.
        return [single]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"model: {index.name} names {file.name}, which is missing")
    return files


def _parts(path: Path, index: str) -> list[Path]:
    """All parts of weights that have no index. Raises ConfigError."""
    matches = [match for file in path.glob("model-*.safetensors") if (match := _PART.fullmatch(file.name))]
    if not matches:
        raise ConfigError(
            f"model: {path.name} holds no model.safetensors (pickled weights, .bin, are not loaded)"
        )
    count = max(int(match[1]) for match in matches)
    missing = count - len(matches)
    if missing:
        raise ConfigError(
            f"model: {path.name} has no {index}, and {missing} of {count} parts of its weights are missing"
        )
    return sorted(path / match[0] for match in matches)


def check_pointer(file: Path) -> None:
    """Raise ConfigError for what Git leaves in place of a file that Git LFS keeps. Raises OSError."""
    opened, _ = open_regular(file, sys.maxsize)
    with opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise ConfigError(
                f"model: {file.name} is a pointer of Git LFS, not the file: git lfs pull gets it"
            )


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory. Raises ConfigError."""
    try:
        check_pointer(file)
        value = json.loads(read_regular(file, MOST_JSON).decode("utf-8"))
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {file.name} cannot be read: {why(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model: {file.name} holds no JSON object")
    return value


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _unreadable(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"model: {name} cannot be read from its file: {error}")
