"""GGUFTensors: the tensors of a GGUF file under transformers' names, in transformers' order of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.gguf.architectures import architecture_of
from aioinfer.checkpoint.gguf.architectures.base import Architecture
from aioinfer.checkpoint.gguf.blocks import BLOCKS
from aioinfer.checkpoint.gguf.config import name_of
from aioinfer.checkpoint.gguf.file import GGUFFile, StoredTensor
from aioinfer.checkpoint.tensors import QuantisedMatrix, Rounding, Tensors
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["GGUFTensors", "StoredTensors"]

#: end of the names of norms' weights
_NORM = "norm.weight"
_PLAIN = {"F32": "<f4", "F16": "<f2"}
#: elements that are dequantised at a time
_SLICE = 1 << 22


class StoredTensors(Tensors):
    """Tensors as they lie in a GGUF file; blocks of 4 to 8 bits keep their numbers."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        """``stored``: by their names."""
        self._stored = stored

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read(self, name: str) -> torch.Tensor:
        import torch

        stored, data = self._stored[name], self._rows(name)
        kind = stored.kind.name
        if kind in _PLAIN:
            return torch.from_numpy(_writable(data).view(_PLAIN[kind]).reshape(stored.shape))
        if kind == "BF16":
            return torch.from_numpy(_writable(data).view("<i2").reshape(stored.shape)).view(torch.bfloat16)
        return torch.from_numpy(_dequantised(name, stored, data).reshape(stored.shape))

    def rounding(self, name: str) -> Rounding | None:
        stored = self._stored[name]
        kind = stored.kind.name
        return BLOCKS[kind][0] if kind in BLOCKS and len(stored.shape) == 2 else None

    def quantised(self, name: str) -> QuantisedMatrix:
        import torch

        rounding, unpack = BLOCKS[self._stored[name].kind.name]
        values, scales, offsets = unpack(self._rows(name))
        return QuantisedMatrix(
            torch.from_numpy(values),
            torch.from_numpy(scales),
            None if offsets is None else torch.from_numpy(offsets),
            rounding,
        )

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor."""
        return self._stored[name].data


class GGUFTensors(StoredTensors):
    """The tensors of a language model."""

    def __init__(self, file: GGUFFile, heads: int, kv_heads: int) -> None:
        """``heads`` and ``kv_heads``: of queries and keys."""
        super().__init__({})
        architecture = architecture_of(file)
        self._heads: dict[str, int] = {}
        self._norms_plus_one, self._transposed = architecture.norms_plus_one, architecture.transposed
        for name, tensor in _unfused(file.tensors, architecture, heads, kv_heads):
            own = name_of(name, architecture)
            if own is None:
                continue
            if own in self._stored:
                raise ConfigError(f"model: the GGUF file has {own} twice, once as {name}")
            self._stored[own] = tensor
            for part, count in ((".q_proj.", heads), (".k_proj.", kv_heads)):
                if architecture.neighbours and part in own:
                    self._heads[own] = count

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return shape[::-1] if name.endswith(self._transposed) else shape

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if name.endswith(self._transposed):
            return tensor.T
        # In float32 for every type: adding 1 again must give the same factor.
        return tensor.float() - 1 if self._norms_plus_one and name.endswith(_NORM) else tensor

    def rounding(self, name: str) -> Rounding | None:
        return None if name.endswith(self._transposed) else super().rounding(name)

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, rows in transformers' order."""
        data, heads = super()._rows(name), self._heads.get(name)
        if heads is None:
            return data
        if len(self._stored[name].shape) == 1:
            # A bias has its rows side by side.
            each = data.reshape(self._stored[name].shape[0], -1)
            return _in_halves(name, each, heads).reshape(data.shape)
        return _in_halves(name, data, heads)


def _unfused(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, heads: int, kv_heads: int
) -> Iterator[tuple[str, StoredTensor]]:
    """Names and tensors, with one of queries, keys and values, which llama.cpp's converter makes of any
    architecture if asked to, as the three that it was made of. Raises ConfigError."""
    counts = {"attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads}
    for name, tensor in tensors.items():
        if ".attn_qkv." not in name or "attn_qkv" in architecture.names:
            yield name, tensor
            continue
        total, *inner = tensor.shape
        size, rest = divmod(total, sum(counts.values()))
        if rest:
            raise ConfigError(f"model: {name} has {total} rows for {heads} and {kv_heads} heads")
        # A bias has its rows side by side.
        rows, start = tensor.data.reshape(total, -1), 0
        for part, count in counts.items():
            data = rows[start : start + count * size]
            shape = (count * size, *inner)
            yield (
                name.replace("attn_qkv", part),
                StoredTensor(tensor.kind, shape, data if inner else data.reshape(1, -1)),
            )
            start += count * size


def _in_halves(name: str, rows: npt.NDArray[np.uint8], heads: int) -> npt.NDArray[np.uint8]:
    """Rows of heads from the order of neighbours that rotate together to that of two halves."""
    if len(rows) % (2 * heads):
        raise ConfigError(f"model: {name} has {len(rows)} rows for {heads} heads")
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _writable(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of what is mapped for reading: torch has no arrays that cannot be written."""
    return data if data.flags.writeable else data.copy()


def _dequantised(name: str, stored: StoredTensor, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """[rows, inner], by the package gguf. Raises ConfigError for a type that it does not know."""
    from gguf.quants import dequantize

    inner = stored.shape[-1]
    found = np.empty((len(data), inner), dtype=np.float32)
    step = max(1, _SLICE // inner)
    try:
        for start in range(0, len(data), step):
            found[start : start + step] = dequantize(data[start : start + step], stored.kind)
    except NotImplementedError as error:
        # The package writes some types, which llama.cpp reads, and cannot read them back.
        raise ConfigError(f"model: {name} is of type {stored.kind.name}, which is not read") from error
    return found
