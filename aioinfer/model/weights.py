"""Weights: memory-mapped safetensors, one file or sharded, read tensor by tensor; or random weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.quantization import Rounding
from aioinfer.model.spec import Progress, read_json_object

__all__ = ["RandomWeights", "StoredMatrix", "Weights", "checkpoint_bytes", "weight_files"]


class Weights:
    """The tensors of a checkpoint directory, memory-mapped and read on demand.

    :meth:`take` returns tensors in ``dtype`` on ``device``. On the CPU a tensor that is stored in that dtype
    stays mapped and is not copied.
    """

    def __init__(
        self, path: Path, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        """Raises ConfigError if there are no safetensors, or if a file that their index names is missing."""
        from safetensors import SafetensorError, safe_open

        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files: dict[str, Any] = {}
        try:
            for file in weight_files(path):
                opened: Any = safe_open(file, framework="pt", device="cpu")
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error
        self._total = len(self._files)
        self._taken: set[str] = set()
        self.num_parameters = 0

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that are returned."""
        return self._dtype

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in ``dtype`` if given. Raises ConfigError if it is missing or has another shape."""
        return self._read(name, shape).to(self._device, dtype or self._dtype)

    def take_into(self, part: torch.Tensor, name: str) -> None:
        """Copy one tensor into a part of a larger one. Raises ConfigError if it is missing or has another
        shape."""
        part.copy_(self._read(name, tuple(part.shape)))

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor with the dtype and device of this object's."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Count a tensor as taken, without reading it. Raises ConfigError if it is missing or has another
        shape."""
        opened = self._files.get(name)
        if opened is None:
            raise ConfigError(f"model: the checkpoint has no tensor {name}")
        try:
            found = tuple(opened.get_slice(name).get_shape())
        except Exception as error:
            raise _unreadable_tensor(name, error) from error
        if found != shape:
            raise ConfigError(f"model: {name} is shaped {found}, the config says {shape}")
        self._count(name, shape)
        if self._progress is not None:
            self._progress("weights", len(self._taken), self._total)

    def _count(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._taken:
            self._taken.add(name)
            self.num_parameters += math.prod(shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.declare(name, shape)
        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except Exception as error:
            raise _unreadable_tensor(name, error) from error
        return tensor

    def fused(self, names: Iterable[str], rows: Iterable[int], *tail: int) -> torch.Tensor:
        """Tensors ``[rows, *tail]`` concatenated along the first dimension, so that one matrix product
        replaces several. Raises ConfigError as :meth:`take`."""
        parts = [self.take(name, (count, *tail)) for name, count in zip(names, rows, strict=True)]
        return torch.cat(parts)

    def check_all_taken(self, ignore: Iterable[str] = ()) -> None:
        """Raise ConfigError if the checkpoint has tensors that were not taken, ``ignore`` and frequency
        tables excepted."""
        left = sorted(
            name
            for name in set(self._files) - self._taken - set(ignore)
            # Old checkpoints contain the rotary frequencies, which follow from the config.
            if not name.endswith("rotary_emb.inv_freq")
        )
        if left:
            raise ConfigError(f"model: the checkpoint has {len(left)} unexpected tensors, first {left[0]}")


class RandomWeights(Weights):
    """Random tensors of any name and shape, made on the device: to measure a model's speed without its files.

    A tensor depends on the seed, its name, its shape and the type of the device, not on what was taken before
    it. Matrices are normal with a variance of 1 / fan-in, which preserves the magnitude of activations; norms
    are 1 and biases 0, as at the start of a training.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        check_size: Callable[[int], None] | None = None,
    ) -> None:
        """``check_size`` is called with the bytes of a tensor before it is made."""
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self._check_size = check_size
        self._taken: set[str] = set()
        self.num_parameters = 0

    def __contains__(self, name: str) -> bool:
        return True

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        self._count(name, shape)

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._check_size is not None:
            self._check_size(math.prod(shape) * (dtype or self._dtype).itemsize)
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self.take_into(tensor, name)
        return tensor

    def take_into(self, part: torch.Tensor, name: str) -> None:
        self._count(name, tuple(part.shape))
        self.fill(name, part)

    def fill(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite an existing tensor, in its own dtype and on its own device, and return it."""
        if tensor.dim() < 2:
            return tensor.fill_(0 if name.endswith("bias") else 1)
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode(), self._seed))
        return tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)

    def check_all_taken(self, ignore: Iterable[str] = ()) -> None:
        """Does nothing: there is no checkpoint."""


class StoredMatrix:
    """A matrix of a checkpoint: tensors [rows[i], width], one below the other, and their biases or none.

    Its tensors count as taken when it is made; they are read by :meth:`load`.
    """

    __slots__ = ("_bias", "_names", "_rows", "_weights", "_width")

    def __init__(
        self, weights: Weights, names: Sequence[str], rows: Sequence[int], width: int, *, bias: bool = False
    ) -> None:
        """``names`` are those of the tensors, without ".weight" and ".bias". Raises ConfigError if one is
        missing or has another shape."""
        self._weights, self._names, self._rows, self._width, self._bias = weights, names, rows, width, bias
        for name, count in zip(names, rows, strict=True):
            weights.declare(f"{name}.weight", (count, width))

    @property
    def name(self) -> str:
        """The names of its tensors in order."""
        return " ".join(self._names)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return sum(self._rows), self._width

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that are returned."""
        return self._weights.dtype

    def load(self) -> torch.Tensor:
        """The matrix, ``shape``, in memory of its own."""
        return self._weights.fused([f"{name}.weight" for name in self._names], self._rows, self._width)

    def view(self) -> torch.Tensor:
        """The same to be read at once, or to be kept as long as the checkpoint does not change: a single
        tensor may stay mapped."""
        if len(self._names) > 1:
            return self.load()
        return self._weights.take(f"{self._names[0]}.weight", self.shape)

    def bias(self) -> torch.Tensor | None:
        """[rows], or None. Raises ConfigError if one is missing or has another shape."""
        if not self._bias:
            return None
        return self._weights.fused([f"{name}.bias" for name in self._names], self._rows)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory. Raises ConfigError if there are none, or if a file that the
    index of a sharded checkpoint names is missing."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        single = path / "model.safetensors"
        if not single.is_file():
            raise ConfigError(
                f"model: {path.name} holds no model.safetensors (pickled weights, .bin, are not loaded)"
            )
        return [single]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise ConfigError(f"model: {index.name} has no weight_map of file names")
    files = [path / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"model: {index.name} names {file.name}, which is missing")
    return files


def checkpoint_bytes(path: Path, dtype: torch.dtype, rounding: Rounding | None = None) -> int:
    """Bytes that the tensors of a checkpoint take in ``dtype``, or at least as if all of them were rounded.

    Reads the headers of its files. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    numbers = 0
    try:
        for file in weight_files(path):
            opened: Any
            with safe_open(file, framework="pt", device="cpu") as opened:
                names = opened.keys()
                numbers += sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return numbers * (8 * dtype.itemsize if rounding is None else rounding.bits) // 8


def _unreadable_tensor(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"model: {name} cannot be read from its file: {error}")


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"model: the weights of {path.name} cannot be read: {error}")


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
