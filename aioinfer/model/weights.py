"""Weights: the tensors of a checkpoint, read one by one as a model takes them; or random ones."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from aioinfer.checkpoint.hub import Progress
from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding, Tensors
from aioinfer.errors import ConfigError
from aioinfer.system.mapped_pages import give_back

__all__ = [
    *("RandomWeights", "StoredMatrix", "Weights"),
    *("joined_block", "joined_float8", "joined_quantised", "joint_rounding", "rows_of"),
]


#: bytes of mapped files that count as this process's memory while they are read, but for a larger tensor
_MOST_READ = 64 << 20


class Weights:
    """The tensors of a checkpoint, read on demand.

    :meth:`take` returns tensors in ``dtype`` on ``device``. On the CPU a tensor that is stored in that dtype
    stays mapped and is not copied. Pages of the files that were read are given back now and then.
    """

    def __init__(
        self,
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """``files``: those that are mapped."""
        self._tensors = tensors
        self._files = files
        #: bytes of tensors that were read since pages were given back
        self._read_bytes = 0
        #: of these tensors
        self._addresses: list[int] = []
        #: names of all tensors
        self.names = frozenset(tensors.names)
        #: of the tensors that are returned
        self.dtype = dtype
        self._device = device
        self._progress = progress
        self._taken: set[str] = set()
        self.num_parameters = 0
        self._reopen: Callable[[], Tensors] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self.names

    @property
    def used(self) -> list[str]:
        """Names already taken."""
        return sorted(self._taken & self.names)

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in ``dtype`` if given. Raises ConfigError if it is missing or has another shape."""
        return self._read(name, shape).to(self._device, dtype or self.dtype)

    def take_into(self, part: torch.Tensor, name: str) -> None:
        """Copy one tensor into a part of a larger one. Raises ConfigError if it is missing or has another
        shape."""
        part.copy_(self._read(name, tuple(part.shape)))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor on the device of this object's, with ``dtype`` or this object's. Raises
        ConfigError if the processor's memory cannot hold it."""
        try:
            return torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        except RuntimeError as error:
            if self._device.type != "cpu":
                raise
            raise ConfigError(f"model: no memory for weights shaped {shape}, as stated") from error

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Count a tensor as taken, without reading it. Raises ConfigError if it is missing or has another
        shape."""
        if name not in self.names:
            raise ConfigError(f"model: the checkpoint has no tensor {name}")
        found = self._tensors.shape(name)
        if found != shape:
            raise ConfigError(f"model: {name} is shaped {found}, the config says {shape}")
        self._count(name, shape)
        if self._progress is not None:
            self._progress("weights", len(self._taken), len(self.names))

    def leave(self, name: str) -> None:
        """Have a tensor that is not needed be no unexpected one, if the checkpoint has it."""
        if name in self:
            self._taken.add(name)

    def rounding(self, name: str) -> Rounding | None:
        """Rounding of a matrix in the checkpoint; None: it has none, or cannot be taken as it is."""
        return self._tensors.rounding(name) if name in self.names else None

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        """A matrix that is quantised, as it is stored, on the CPU; ``at``: its number in a stack. Raises
        ConfigError."""
        self._reads(name, 1, at)
        return self._tensors.quantised(name, at)

    def float8(self, name: str) -> Float8Matrix | None:
        """A matrix that is stored as floats of 8 bits, or a stack of such, as it is stored, on the CPU; None:
        it is not. Raises ConfigError."""
        return self._tensors.float8(name) if name in self.names else None

    def again(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that was taken before, of ``shape``, with the numbers that are computed with; on the CPU,
        float32. Raises ConfigError."""
        if self._reopen is not None:
            self._tensors, self._reopen = self._reopen(), None
        return self._tensors.read(name).to(self.dtype).float()

    def close(self, reopen: Callable[[], Tensors]) -> None:
        """Let go of the files, which :meth:`again` opens anew; nothing else is read any more."""
        self.give_back()
        self._reopen = reopen
        del self._tensors

    def _count(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._taken:
            self._taken.add(name)
            self.num_parameters += math.prod(shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.declare(name, shape)
        self._reads(name, self.dtype.itemsize)
        tensor = self._tensors.read(name)
        if self._files:
            self._addresses.append(tensor.data_ptr())
        return tensor

    def _reads(self, name: str, itemsize: int, at: int | None = None) -> None:
        """A tensor is read next, or one of a stack; those before it were copied, or come back as they are
        touched."""
        if self._read_bytes > _MOST_READ:
            self.give_back()
        shape = self._tensors.shape(name)
        self._read_bytes += itemsize * math.prod(shape if at is None else shape[1:])

    def give_back(self) -> None:
        """Take the files out of this process's memory. Nobody has written to a tensor yet."""
        give_back(self._files, self._addresses)
        self._addresses.clear()
        self._read_bytes = 0

    def fused(self, names: Iterable[str], rows: Iterable[int], *tail: int) -> torch.Tensor:
        """Tensors ``[rows, *tail]`` concatenated along the first dimension, so that one matrix product
        replaces several. Raises ConfigError as :meth:`take`."""
        parts = [self.take(name, (count, *tail)) for name, count in zip(names, rows, strict=True)]
        return torch.cat(parts)

    def differs(self, name: str, other: str) -> bool:
        """Whether the checkpoint has both tensors, and they are not the same."""
        if name not in self.names or other not in self.names:
            return False
        one, two = self._tensors.read(name), self._tensors.read(other)
        return one.shape != two.shape or not torch.equal(one, two.to(one.dtype))

    def check_all_taken(
        self, ignore: Iterable[str] = (), unread: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Raise ConfigError if the checkpoint has tensors that were not taken, those excepted whose names end
        with one of ``ignore``, or are ``unread``."""
        endings = tuple(ignore)
        left = sorted(
            name
            for name in self.names - self._taken
            if not name.endswith(endings) and not unread(name) and not self._adds_nothing(name)
        )
        if left:
            raise ConfigError(f"model: the checkpoint has {len(left)} unexpected tensors, first {left[0]}")

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros: tools that quantise write one for every layer."""
        return name.endswith(".bias") and not bool(self._tensors.read(name).any())


class RandomWeights(Weights):
    """Random tensors of any name and shape, made on the device: to measure a model's speed without its files.

    A tensor depends on the seed, its name, its shape and the type of the device, not on what was taken before
    it. Matrices are normal with a variance of 1 / their last dimension, the fan-in as a rule, which preserves
    the magnitude of activations; vectors are 1 and biases 0.
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
        self.dtype = dtype
        self._device = device
        self._seed = seed
        self._check_size = check_size
        self._taken: set[str] = set()
        self.num_parameters = 0

    def __contains__(self, name: object) -> bool:
        return True

    @property
    def names(self) -> frozenset[str]:  # type: ignore[override]
        """Names already taken."""
        return frozenset(self._taken)

    def give_back(self) -> None:
        """Does nothing: there are no files."""

    def close(self, reopen: Callable[[], Tensors]) -> None:
        """Does nothing, either."""

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        self._count(name, shape)

    def rounding(self, name: str) -> Rounding | None:
        return None

    def float8(self, name: str) -> Float8Matrix | None:
        return None

    def differs(self, name: str, other: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._check_size is not None:
            self._check_size(math.prod(shape) * (dtype or self.dtype).itemsize)
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        self.take_into(tensor, name)
        return tensor

    def take_into(self, part: torch.Tensor, name: str) -> None:
        self._count(name, tuple(part.shape))
        self.fill(name, part)

    def again(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.fill(name, torch.empty(shape, dtype=self.dtype, device=self._device)).cpu().float()

    def fill(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite an existing tensor, in its own dtype and on its own device, and return it."""
        if tensor.dim() < 2 or name.endswith("bias"):
            return tensor.fill_(0 if name.endswith("bias") else 1)
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode(), self._seed))
        return tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)

    def check_all_taken(
        self, ignore: Iterable[str] = (), unread: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Does nothing: there is no checkpoint."""


class StoredMatrix:
    """A matrix of a checkpoint: tensors [rows[i], width], one below the other, and their biases or none.

    Its tensors count as taken when it is made; they are read by :meth:`load`.
    """

    __slots__ = ("_bias", "_weights", "_width", "dtype", "names", "order", "rows", "shape", "transposed")

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        rows: Sequence[int],
        width: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        order: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            names: of the tensors, without ".weight" and ".bias".
            transposed: they are stored as [width, rows[i]].
            order: [sum of rows] int64: row i of the matrix is row ``order[i]`` of the tensors.

        Raises:
            ConfigError: one is missing or has another shape.
        """
        self._weights, self.names, self.rows, self._width, self._bias = weights, names, rows, width, bias
        self.transposed, self.order = transposed, order
        self.shape, self.dtype = (sum(rows), width), weights.dtype
        for name, count in zip(names, rows, strict=True):
            weights.declare(f"{name}.weight", (width, count) if transposed else (count, width))

    def declare_biases(self) -> None:
        """Count its biases as taken, without reading them. Raises ConfigError if one is missing or has
        another shape."""
        for name, count in zip(self.tensors[1], self.rows, strict=False):
            self._weights.declare(name, (count,))

    @property
    def name(self) -> str:
        """The names of its tensors in order."""
        return " ".join(self.names)

    @property
    def tensors(self) -> tuple[list[str], list[str]]:
        """The full names of its tensors, and of their biases."""
        weights, biases = ([f"{name}.{end}" for name in self.names] for end in ("weight", "bias"))
        return weights, biases if self._bias else []

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of :meth:`quantised`; None if one of its tensors is not quantised."""
        if self.transposed:
            return None
        return joint_rounding([self._weights.rounding(f"{name}.weight") for name in self.names], self._width)

    def quantised(self) -> QuantisedMatrix:
        """The matrix as it is stored; parts of fewer bits, or of larger groups, as the others have them,
        without loss."""
        rounding = self.rounding
        assert rounding is not None, "it is not quantised"
        matrix = joined_quantised(
            [self._weights.quantised(f"{name}.weight") for name in self.names], rounding
        )
        return matrix if self.order is None else rows_of(matrix, self.order)

    def float8(self) -> Float8Matrix | None:
        """The matrix as it is stored, if all of its tensors are floats of 8 bits, with blocks of one width;
        else None. Where blocks of several heights or at odd places are joined, scales are repeated."""
        if self.transposed:
            return None
        stored = [self._weights.float8(f"{name}.weight") for name in self.names]
        parts = [part for part in stored if part is not None]
        if len(parts) < len(stored) or joined_block(parts) is None:
            return None
        if self.order is None:
            return joined_float8(parts)
        matrix = joined_float8(parts, 1)
        # Bytes, which can be put into any order.
        values = self._ordered(matrix.values.view(torch.uint8)).view(torch.float8_e4m3fn)
        return Float8Matrix(values, self._ordered(matrix.scales), matrix.block)

    def load(self) -> torch.Tensor:
        """The matrix, ``shape``, in memory of its own."""
        names = [f"{name}.weight" for name in self.names]
        if not self.transposed:
            return self._ordered(self._weights.fused(names, self.rows, self._width))
        shapes = [(self._width, count) for count in self.rows]
        parts = [self._weights.take(name, shape).T for name, shape in zip(names, shapes, strict=True)]
        return self._ordered(torch.cat(parts).contiguous())

    def view(self) -> torch.Tensor:
        """The same to be read at once, or to be kept as long as the checkpoint does not change: a single
        tensor may stay mapped."""
        if len(self.names) > 1 or self.transposed or self.order is not None:
            return self.load()
        return self._weights.take(f"{self.names[0]}.weight", self.shape)

    def bias(self) -> torch.Tensor | None:
        """[rows], or None. Raises ConfigError if one is missing or has another shape."""
        if not self._bias:
            return None
        return self._ordered(self._weights.fused([f"{name}.bias" for name in self.names], self.rows))

    def again(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One of its tensors [rows, width], and its bias or None, once the matrix has been loaded; as they
        are computed with but for :attr:`order`, on the CPU, float32."""
        name, rows, width = self.names[index], self.rows[index], self._width
        shape = (width, rows) if self.transposed else (rows, width)
        weight = self._weights.again(f"{name}.weight", shape)
        bias = self._weights.again(f"{name}.bias", (rows,)) if self._bias else None
        return weight.T if self.transposed else weight, bias

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.order is None else rows[self.order.to(rows.device)]


def joined_block(parts: Sequence[Float8Matrix]) -> tuple[int, int] | None:
    """The block of matrices, one below the other, as one: as high as it can be. None if their blocks are not
    of one width."""
    widths = {part.block[1] for part in parts}
    if len(widths) > 1:
        return None
    begins = itertools.accumulate(len(part.values) for part in parts[:-1])
    return math.gcd(*(part.block[0] for part in parts), *begins), widths.pop()


def joined_float8(parts: Sequence[Float8Matrix], height: int | None = None) -> Float8Matrix:
    """Matrices, whose blocks are of one width, one below the other. Where blocks of several heights or at odd
    places are joined, scales are repeated; ``height``: of the blocks of the result."""
    block = joined_block(parts)
    assert block is not None
    height = height or block[0]
    if len(parts) == 1 and height == block[0]:
        return parts[0]
    scales = [
        part.scales.repeat_interleave(part.block[0] // height, dim=0)[: -(-len(part.values) // height)]
        for part in parts
    ]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Float8Matrix(values, torch.cat(scales), (height, block[1]))


def joint_rounding(parts: Sequence[Rounding | None], width: int) -> Rounding | None:
    """The rounding that matrices of ``width`` columns, one below the other, can have without loss; None if
    one has none, or groups that do not fit. Those with different tables have 8 bits."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    sizes, tables = [part.group or width for part in known], {part.table for part in known}
    group = min(sizes)
    if any(size % group for size in sizes):
        return None
    group = 0 if group == width else group
    if len(tables) > 1:
        return Rounding(8, group)
    return Rounding(max(part.bits for part in known), group, tables.pop())


def joined_quantised(matrices: Iterable[QuantisedMatrix], rounding: Rounding) -> QuantisedMatrix:
    """Matrices, one below the other, in their joint rounding; parts of fewer bits, or of larger groups, as
    the others have them, without loss."""
    parts = [_widened(matrix, rounding) for matrix in matrices]
    if len(parts) == 1:
        return parts[0]
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([_offsets(part) for part in parts])
    values, scales = (torch.cat(each) for each in zip(*(part[:2] for part in parts), strict=True))
    return QuantisedMatrix(values, scales, offsets, rounding)


def rows_of(matrix: QuantisedMatrix, order: torch.Tensor) -> QuantisedMatrix:
    """The rows of a matrix in another order; ``order``: int64, of each row the present one."""
    values, scales, offsets, rounding = matrix
    return QuantisedMatrix(
        values[order], scales[order], None if offsets is None else offsets[order], rounding
    )


def _offsets(matrix: QuantisedMatrix) -> torch.Tensor:
    return matrix.scales * -matrix.rounding.zero if matrix.offsets is None else matrix.offsets


def _widened(matrix: QuantisedMatrix, rounding: Rounding) -> QuantisedMatrix:
    """The same matrix with as many bits, or more, and groups as large, or smaller."""
    if matrix.rounding == rounding:
        return matrix
    values, offsets = matrix.values, matrix.offsets
    if matrix.rounding.table != rounding.table:
        values = torch.tensor(matrix.rounding.table, dtype=torch.int8)[values.int()]
    elif matrix.rounding.bits != rounding.bits:
        offsets = _offsets(matrix)
        if rounding.bits == 8:
            values = values.to(torch.int8)
    inner = values.shape[1]
    group = rounding.group or inner
    times, groups = (matrix.rounding.group or inner) // group, -(-inner // group)
    scales, offsets = (
        None if each is None else each.repeat_interleave(times, dim=1)[:, :groups]
        for each in (matrix.scales, offsets)
    )
    assert scales is not None
    return QuantisedMatrix(values, scales, offsets, rounding)
