"""KVPool: the KV cache in device memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from aioinfer.ledger import Share
from aioinfer.system.memory import resident, zeros

__all__ = ["KVPool", "KVScales", "KVShape", "pool_zeros"]


def pool_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, share: str = "KV pages"
) -> torch.Tensor:
    """Zeros for a KV pool. On a CPU their memory is taken page by page when it is first written: the unused
    part of a pool costs nothing, and is promised in the ledger, under the name ``share``, while it lives."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    memory = np.frombuffer(zeros(size), np.uint8)
    promised = Share(share, size, partial(resident, memory.ctypes.data, size))
    # It ends with the last reference to it, which the finalizer has.
    weakref.finalize(memory, id, promised).atexit = False
    return torch.from_numpy(memory[:size]).view(dtype).view(*shape)


class KVShape(NamedTuple):
    """The keys of one position in one layer; its values have the same shape, or are no more than a part of
    the keys."""

    num_kv_heads: int
    head_dim: int
    #: the values are so many first elements of the keys, which alone are stored: latents (MLA, arXiv
    #: 2405.04434); None: values are stored
    value_dim: int | None = None

    @property
    def elements(self) -> int:
        """What is stored of a position."""
        return (2 if self.value_dim is None else 1) * self.num_kv_heads * self.head_dim


class KVScales(NamedTuple):
    """Factors of keys and values of 8 bits: exponents plus 127 of powers of two, uint8 [pages, page_size,
    num_kv_heads]; 0 stands for 0, and 255 for a value that is not finite."""

    keys: torch.Tensor
    values: torch.Tensor


class KVPool:
    """Keys and values of all layers, each ``[num_pages + 1, page_size, num_kv_heads, head_dim]``. Layers may
    differ in their shape; a page is the same positions in all of them. Values of latents are views of keys.

    Page 0 is the null page: padding rows write there, and no request's context contains it. The pool starts
    as zeros, so a masked read finds no NaN at first (0 * NaN is NaN). That does not last: a request whose
    values overflowed leaves NaN in pages that are reused. Kernels must read valid cells only.
    """

    __slots__ = (
        "dtype",
        "key_cells",
        "key_scales",
        "keys",
        "layers",
        "page_size",
        "value_cells",
        "value_scales",
        "values",
    )

    def __init__(
        self,
        layers: Sequence[KVShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        float8: bool = False,
    ) -> None:
        """``float8``: keys and values are e4m3 with a power of two for each head of a cell; ``dtype`` is the
        type of the computation."""
        shapes = [(num_pages + 1, page_size, *shape[:2]) for shape in layers]
        self.layers = tuple(layers)
        self.page_size = page_size
        self.dtype = dtype
        stored = torch.float8_e4m3fn if float8 else dtype
        self.keys = [pool_zeros(shape, stored, device) for shape in shapes]
        self.values = [
            pool_zeros(shape, stored, device) if kv.value_dim is None else keys[..., : kv.value_dim]
            for kv, shape, keys in zip(layers, shapes, self.keys, strict=True)
        ]
        #: with ``float8``, exponents plus 127 [num_pages + 1, page_size, num_kv_heads], uint8, and 0 for 0
        counts = [shape[:3] for shape in shapes] if float8 else []
        self.key_scales = [pool_zeros(shape, torch.uint8, device) for shape in counts]
        self.value_scales = [pool_zeros(shape, torch.uint8, device) for shape in counts]
        #: the same memory by KV cell, [cells, num_kv_heads, head_dim]
        self.key_cells = [store.flatten(0, 1) for store in self.keys]
        self.value_cells = [
            store.flatten(0, 1) if kv.value_dim is None else cells[..., : kv.value_dim]
            for kv, store, cells in zip(layers, self.values, self.key_cells, strict=True)
        ]

    @property
    def stores(self) -> list[torch.Tensor]:
        """The memory of all layers, [pages, ...] each."""
        values = [store for kv, store in zip(self.layers, self.values, strict=True) if kv.value_dim is None]
        return [*self.keys, *values, *self.key_scales, *self.value_scales]

    @staticmethod
    def bytes_per_page(
        layers: Sequence[KVShape], page_size: int, dtype: torch.dtype, *, float8: bool = False
    ) -> int:
        """Bytes of one page over all layers, keys and values together."""
        if float8:
            return 2 * page_size * sum(shape.num_kv_heads * (shape.head_dim + 1) for shape in layers)
        return page_size * dtype.itemsize * sum(shape.elements for shape in layers)

    def scales(self, layer: int) -> KVScales | None:
        """Factors of the keys and values of a layer; None if these are of ``dtype``."""
        return KVScales(self.key_scales[layer], self.value_scales[layer]) if self.key_scales else None

    def write(self, layer: int, slot_mapping: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [T, num_kv_heads, head_dim] at KV cells [T]; of latents the keys."""
        self.key_cells[layer].index_copy_(0, slot_mapping, keys)
        if self.layers[layer].value_dim is None:
            self.value_cells[layer].index_copy_(0, slot_mapping, values)
