"""Format: how a checkpoint stores a quantised matrix in several tensors; QuantisedTensors joins them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding, Tensors
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Delegating",
    "Format",
    "NothingQuantised",
    "QuantisedTensors",
    "Stack",
    "Stored",
    "ZeroPoints",
    "dequantised",
    "dequantised_elements",
    "finite",
    "rounding_of_groups",
    "row_slices",
    "unpacked",
]

#: scales of keys and values, which are not quantised here
_OF_KV = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale"})
#: elements that are dequantised at a time
_SLICE = 1 << 22
#: dimensions of a stack of matrices
_STACK = 3
#: sizes of groups that native kernels multiply; 0: one group
_GROUPS = (0, 32, 64, 128)


class Stored:
    """The tensors that make up one module's weight."""

    def __init__(self, tensors: Tensors, module: str) -> None:
        self._tensors = tensors
        self.module = module

    def has(self, part: str) -> bool:
        return self._full(part) in self._tensors.names

    def shape(self, part: str) -> tuple[int, ...]:
        """Raises ConfigError if the part is missing."""
        return self._tensors.shape(self._name(part))

    def read(self, part: str) -> torch.Tensor:
        """Raises ConfigError if the part is missing."""
        return self._tensors.read(self._name(part))

    def group_index(self, part: str, groups: int) -> torch.Tensor:
        """A part that has the group of each element, int64. Raises ConfigError for a group that does not
        exist."""
        found = self.read(part).long()
        if int(found.min()) < 0 or int(found.max()) >= groups:
            raise ConfigError(f"model: {self.module}.{part} names groups that do not exist")
        return found

    def typed(self, part: str, *types: str) -> torch.Tensor:
        """A part of one of these types. Raises ConfigError for another one."""
        found = self.read(part)
        if str(found.dtype).removeprefix("torch.") not in types:
            raise ConfigError(f"model: {self._name(part)} is of {found.dtype}, not {' or '.join(types)}")
        return found

    def floats(self, part: str) -> torch.Tensor:
        """A part of floats, float32. Raises ConfigError for other numbers, and for one that is not finite."""
        found = self.typed(part, "float32", "float16", "bfloat16").float()
        if not bool(found.isfinite().all()):
            raise ConfigError(f"model: {self._name(part)} has numbers that are not finite")
        return found

    def parts(self, *names: str) -> set[str]:
        """The full names of parts, whether they are there or not."""
        return {self._full(part) for part in names}

    def _name(self, part: str) -> str:
        name = self._full(part)
        if name not in self._tensors.names:
            raise ConfigError(f"model: {self.module} is quantised, and the checkpoint has no {name}")
        return name

    def _full(self, part: str) -> str:
        return f"{self.module}.{part}"


class Stack(Stored):
    """The tensors that make up a stack of matrices [count, rows, inner], such as those of a layer's experts:
    it is no weight of a module, and its parts have its own name in front: ``down_proj_scale_inv``."""

    def _full(self, part: str) -> str:
        return self.module if part == "weight" else f"{self.module}_{part.removeprefix('weight_')}"


class Format(ABC):
    """Reads quantised weights. Errors are ConfigErrors that name the tensor."""

    #: the part by which a quantised module is recognised
    marker: str
    #: the other parts, which no model takes; some may be missing
    others: frozenset[str]
    #: whether a :class:`Stack` may be quantised, too
    stacks: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """The parts by one of which a quantised module is recognised."""
        return frozenset({self.marker})

    def quantised(self, stored: Stored) -> bool:
        """Whether a module that has a marker is quantised."""
        return True

    @abstractmethod
    def shape(self, stored: Stored) -> tuple[int, ...]:
        """The shape of the weight that the parts stand for."""

    @abstractmethod
    def read(self, stored: Stored) -> torch.Tensor:
        """The weight, float32."""

    def rounding(self, stored: Stored) -> Rounding | None:
        """The form in which :meth:`matrix` returns it; None if it cannot, and :meth:`read` has to do."""
        return None

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        """The weight as whole numbers with factors."""
        raise AssertionError(f"{stored.module} is not of whole numbers")

    def float8(self, stored: Stored) -> Float8Matrix | None:
        """The weight as floats of 8 bits with scales; None if it is of other numbers."""
        return None


class Delegating(Format):
    """Several formats, one for each module."""

    def __init__(self, formats: Sequence[Format]) -> None:
        self.formats = formats
        self.others = frozenset[str]().union(*(form.others for form in formats))
        self.stacks = any(form.stacks for form in formats)

    @abstractmethod
    def _of(self, stored: Stored) -> Format:
        """The format of a quantised module. Raises ConfigError."""

    @property
    def markers(self) -> frozenset[str]:
        return frozenset[str]().union(*(form.markers for form in self.formats))

    def quantised(self, stored: Stored) -> bool:
        return any(form.quantised(stored) for form in self.formats if any(map(stored.has, form.markers)))

    def shape(self, stored: Stored) -> tuple[int, ...]:
        return self._of(stored).shape(stored)

    def read(self, stored: Stored) -> torch.Tensor:
        return self._of(stored).read(stored)

    def rounding(self, stored: Stored) -> Rounding | None:
        return self._of(stored).rounding(stored)

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        return self._of(stored).matrix(stored)

    def float8(self, stored: Stored) -> Float8Matrix | None:
        return self._of(stored).float8(stored)


class ZeroPoints(Format):
    """Whole numbers in groups with scales and zeros: ``weight = scale * (q - zero)``."""

    bits: int
    #: zeros are in the middle of the range
    symmetric = False

    @abstractmethod
    def parts(self, stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [outputs, inner], uint8, scales and zeros [outputs, groups], float32."""

    @abstractmethod
    def groups(self, stored: Stored) -> int:
        """The number of groups of a row."""

    def order(self, stored: Stored) -> torch.Tensor | None:
        """The group of each element, int64 [inner]; None if groups are runs of equal length."""
        return None

    def rounding(self, stored: Stored) -> Rounding | None:
        if self.order(stored) is not None:
            return None
        return rounding_of_groups(self.bits, self.shape(stored)[1], self.groups(stored))

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        import torch

        rounding = self.rounding(stored)
        assert rounding is not None
        values, scales, zeros = self.parts(stored)
        if rounding.bits == 8:
            # Signed, the zeros shifted as well.
            values, zeros = (values ^ 128).view(torch.int8), zeros - 128
        return QuantisedMatrix(values, scales, None if self.symmetric else -scales * zeros, rounding)

    def read(self, stored: Stored) -> torch.Tensor:
        values, scales, zeros = self.parts(stored)
        groups = self.order(stored)
        if groups is not None:
            return dequantised_elements(values, scales, zeros, groups)
        # As of 4 bits: the offsets say what is subtracted.
        rounding = Rounding(4, values.shape[1] // scales.shape[1])
        return dequantised(QuantisedMatrix(values, scales, -scales * zeros, rounding))


class NothingQuantised(ConfigError):
    """No tensor is quantised, though the config says so."""

    def __init__(self) -> None:
        super().__init__("model: the config says that weights are quantised, and the checkpoint has none")


class QuantisedTensors(Tensors):
    """Tensors of which a format stores weights in parts; they have the names of weights."""

    def __init__(self, tensors: Tensors, form: Format) -> None:
        """Raises ConfigError if a part of a weight is missing."""
        self._tensors = tensors
        self._format = form
        self._modules: dict[str, Stored] = {}
        names = set(tensors.names)
        for name in tensors.names:
            module, _, part = name.rpartition(".")
            if part in form.markers:
                stored, weight = Stored(tensors, module), f"{module}.weight"
            elif form.stacks and len(tensors.shape(name)) == _STACK:
                stored, weight = Stack(tensors, name), name
            else:
                continue
            if form.quantised(stored):
                names.discard(name)
                names -= stored.parts(*form.others)
                if weight in names:
                    raise ConfigError(f"model: {module} is in the checkpoint quantised and not quantised")
                self._modules[weight] = stored
                _check_shape(form, stored)
        if not self._modules:
            raise NothingQuantised
        plain = {name for name in names if name.rpartition(".")[2] not in _OF_KV}
        self._names = frozenset(plain | self._modules.keys())

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._modules.get(name)
        return self._tensors.shape(name) if stored is None else self._format.shape(stored)

    def read(self, name: str) -> torch.Tensor:
        stored = self._modules.get(name)
        return self._tensors.read(name) if stored is None else self._format.read(stored)

    def rounding(self, name: str) -> Rounding | None:
        stored = self._modules.get(name)
        return None if stored is None else self._format.rounding(stored)

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        return self._format.matrix(self._modules[name])

    def float8(self, name: str) -> Float8Matrix | None:
        stored = self._modules.get(name)
        return None if stored is None else self._format.float8(stored)


def _check_shape(form: Format, stored: Stored) -> None:
    """Raise ConfigError if parts are missing or do not fit."""
    try:
        form.shape(stored)
    except ConfigError:
        raise
    except (ZeroDivisionError, ValueError) as error:
        # Of other numbers of dimensions, or of none.
        raise ConfigError(f"model: the parts of {stored.module} do not fit each other") from error


def rounding_of_groups(bits: int, inner: int, groups: int) -> Rounding | None:
    """The rounding of rows of ``inner`` numbers in equal groups; None if no kernel multiplies it."""
    if bits not in (2, 3, 4, 8) or groups < 1 or inner % groups:
        return None
    group = 0 if groups == 1 else inner // groups
    return Rounding(8 if bits == 8 else 4, group) if group in _GROUPS else None


def unpacked(
    words: torch.Tensor, bits: int, order: Callable[[int], int] = lambda place: place
) -> torch.Tensor:
    """The numbers in int32 words [rows, words], uint8 [rows, words * 32 / bits], the lowest bits first. Those
    of 3 bits go on in the next word.

    ``order``: at which of its word's places a number of the result is.
    """
    import torch

    count = 32 // bits
    if 32 % bits:
        return _stream(words, bits)
    found = torch.empty((*words.shape, count), dtype=torch.uint8)
    for place in range(count):
        found[..., place] = (words >> (order(place) * bits)) & (2**bits - 1)
    return found.flatten(-2)


def _stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers that words divide, uint8 [rows, words * 32 // bits]."""
    import torch

    rows, width = words.shape
    places = torch.arange(width * 32 // bits) * bits
    first, shift = places // 32, places % 32
    after = (first + 1).clamp_max(width - 1)
    found = torch.empty(rows, len(places), dtype=torch.uint8)
    for part in row_slices(rows, len(places)):
        # Of 64 bits, which have no sign.
        wide = words[part].long() & 0xFFFFFFFF
        found[part] = ((wide[:, first] | wide[:, after] << 32) >> shift) & (2**bits - 1)
    return found


def finite(stored: Stored, scales: torch.Tensor) -> torch.Tensor:
    """``scales``. Raises ConfigError if one is no number."""
    if not bool(scales.isfinite().all()):
        raise ConfigError(f"model: {stored.module} has scales that are not finite")
    return scales


def row_slices(rows: int, inner: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of rows of ``inner`` elements that are worked on at a time; each begins at a multiple."""
    step = max(1, _SLICE // max(1, inner * multiple)) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def dequantised(matrix: QuantisedMatrix) -> torch.Tensor:
    """float32 [rows, inner]; groups divide the inner dimension."""
    import torch

    values, scales, offsets, rounding = matrix
    rows, inner = values.shape
    group = rounding.group or inner
    found = torch.empty(rows, inner)
    for part in row_slices(rows, inner):
        numbers = torch.tensor(rounding.table)[values[part].int()] if rounding.table else values[part]
        wide = numbers.float().reshape(-1, inner // group, group)
        if offsets is None:
            wide -= rounding.zero
        wide *= scales[part, :, None]
        if offsets is not None:
            wide += offsets[part, :, None]
        found[part] = wide.reshape(-1, inner)
    return found


def dequantised_elements(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, inner], from values [rows, inner] and scales and zeros [rows, groups]; ``groups``: int64
    [inner], the group of each element."""
    import torch

    found = torch.empty(values.shape)
    for rows in row_slices(*values.shape):
        found[rows] = (values[rows] - zeros[rows][:, groups]) * scales[rows][:, groups]
    return found
