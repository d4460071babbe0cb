"""GGUFTensors: the tensors of a GGUF file under transformers' names, in transformers' order of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.gguf.architectures import architecture_of
from aioinfer.checkpoint.gguf.architectures.base import Architecture, Order
from aioinfer.checkpoint.gguf.blocks import BLOCKS
from aioinfer.checkpoint.gguf.config import name_of
from aioinfer.checkpoint.gguf.file import GGUFFile, StoredTensor
from aioinfer.checkpoint.tensors import QuantisedMatrix, Rounding, Tensors
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["GGUFTensors", "StoredTensors"]

_PLAIN = {"F32": "<f4", "F16": "<f2"}
#: elements that are dequantised at a time
_SLICE = 1 << 22

_Found = TypeVar("_Found")


class StoredTensors(Tensors):
    """Tensors as they lie in a GGUF file; blocks keep their numbers."""

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
        return BLOCKS[kind][0] if kind in BLOCKS and len(stored.shape) in (2, 3) else None

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        import torch

        stored, data = self._stored[name], self._rows(name)
        rounding, unpack = BLOCKS[stored.kind.name]
        if at is not None:
            rows = stored.shape[1]
            data = data[at * rows : (at + 1) * rows]
        values, scales, offsets = unpack(data)
        if not (np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())):
            raise ConfigError(f"model: {name} has scales that are not finite")
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

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        """``config``: of the model, see :func:`~aioinfer.checkpoint.gguf.config.config_of`."""
        super().__init__({})
        self._architecture = architecture = architecture_of(file)
        self._config = config
        for name, tensor in _unfused(file.tensors, architecture, config):
            own = name_of(name, architecture, config["num_hidden_layers"])
            if own is None:
                continue
            if own in self._stored:
                raise ConfigError(f"model: the GGUF file has {own} twice, once as {name}")
            self._stored[own] = tensor

    def shape(self, name: str) -> tuple[int, ...]:
        if _ending(self._architecture.values, name) is not None:
            return tuple(self.read(name).shape)
        shape = super().shape(name)
        return shape[::-1] if name.endswith(self._architecture.transposed) else shape

    def read(self, name: str) -> torch.Tensor:
        import torch

        tensor = super().read(name)
        if name.endswith(self._architecture.transposed):
            return tensor.T
        if (order := self._columns(name)) is not None:
            return tensor[:, torch.from_numpy(order)]
        change = _ending(self._architecture.values, name)
        return tensor if change is None else change(tensor)

    def rounding(self, name: str) -> Rounding | None:
        rounding = super().rounding(name)
        if rounding is None or name.endswith(self._architecture.transposed):
            return None
        order = self._columns(name)
        return rounding if order is None or _groups(order, rounding.group) is not None else None

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        import torch

        matrix, order = super().quantised(name, at), self._columns(name)
        groups = None if order is None else _groups(order, matrix.rounding.group)
        if order is None or groups is None:
            return matrix
        values, scales, offsets, rounding = matrix
        by_group = torch.from_numpy(groups)
        offsets = None if offsets is None else offsets[:, by_group]
        return QuantisedMatrix(values[:, torch.from_numpy(order)], scales[:, by_group], offsets, rounding)

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, rows in transformers' order."""
        data, count = super()._rows(name), self._stored[name].shape[0]
        order = self._order(self._architecture.rows, name, count)
        # A vector has its rows side by side.
        return data if order is None else data.reshape(count, -1)[order].reshape(data.shape)

    def _columns(self, name: str) -> npt.NDArray[np.int64] | None:
        return self._order(self._architecture.columns, name, self._stored[name].shape[-1])

    def _order(self, orders: Mapping[str, Order], name: str, count: int) -> npt.NDArray[np.int64] | None:
        make = _ending(orders, name)
        try:
            return None if make is None else make(self._config, count)
        except ValueError as error:
            raise ConfigError(
                f"model: {name} has {count} rows or columns, of which the config's heads cannot be made"
            ) from error


def _ending(by_end: Mapping[str, _Found], name: str) -> _Found | None:
    return next((found for end, found in by_end.items() if name.endswith(end)), None)


def _groups(order: npt.NDArray[np.int64], group: int) -> npt.NDArray[np.int64] | None:
    """The order of groups of neighbours that an order of columns is; None: it tears them apart."""
    if not group or len(order) % group:
        return None
    first = order[::group]
    whole = (first[:, None] + np.arange(group)).ravel()
    return first // group if not (first % group).any() and np.array_equal(whole, order) else None


def _unfused(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensor]]:
    """Names and tensors, with one of queries, keys and values, which llama.cpp's converter makes of any
    architecture if asked to, as the three that it was made of. Raises ConfigError."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
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
        with np.errstate(over="ignore", invalid="ignore"):  # of damaged files
            for start in range(0, len(data), step):
                found[start : start + step] = dequantize(data[start : start + step], stored.kind)
    except NotImplementedError as error:
        # The package writes some types, which llama.cpp reads, and cannot read them back.
        raise ConfigError(f"model: {name} is of type {stored.kind.name}, which is not read") from error
    return found
