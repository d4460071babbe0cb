"""NativeAttention: the kernels in C++ (``native/source/attention.hpp``) over a pool in their own layout."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape, pool_zeros
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from aioinfer.native.arguments import AttendArguments
from aioinfer.native.bindings import ThreadPool
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeAttention"]


class _Projected(NamedTuple):
    """Addresses of queries, keys and values, and the elements from one token to the next."""

    queries: int
    keys: int
    values: int
    query_stride: int
    kv_stride: int


class NativeAttention:
    """Attention by native kernels over pages in their own layout, see ``native/source/kv_pool.hpp``.

    Page 0 is the null page, as in :class:`~aioinfer.model.attention.pool.KVPool`.
    """

    __slots__ = (
        *("_addresses", "_cells", "_dtype", "_layers", "_pool"),
        *("kv_pools", "num_kv_pools", "num_pages", "page_size"),
    )

    def __init__(
        self,
        pool: ThreadPool,
        layers: Sequence[KVShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._pool, self._layers, self.page_size = pool, tuple(layers), page_size
        self._dtype = dtype
        #: the null page included
        self.num_pages = num_pages + 1
        positions = (num_pages + 1) * page_size
        self._cells = [
            pool_zeros((positions * shape.elements,), dtype, torch.device("cpu")) for shape in layers
        ]
        for cells in self._cells:
            pool.kernels.function("huge_pages", cells.data_ptr(), cells.nbytes)
        self._addresses = (ctypes.c_void_p * len(layers))(*(cells.data_ptr() for cells in self._cells))
        #: the address of the addresses of all layers' cells, and how many there are
        self.kv_pools, self.num_kv_pools = ctypes.addressof(self._addresses), len(layers)

    @property
    def page_tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers, [pages, bytes of a page]."""
        return [cells.view(self.num_pages, -1) for cells in self._cells]

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        tokens, heads, dtype = len(q), q.shape[1], self._dtype
        kv_heads, size, _ = self._layers[layer]
        query_stride, kv_stride = heads * size, kv_heads * size
        projected = _Projected(
            address(q, dtype, tokens * query_stride),
            address(k, dtype, tokens * kv_stride),
            address(v, dtype, tokens * kv_stride),
            query_stride,
            kv_stride,
        )
        return self._attend(layer, projected, tokens, heads, None, None, batch, params, sinks)

    def fused(
        self,
        layer: int,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        qkv, tokens, (kv_heads, size) = qkv.contiguous(), len(qkv), self._layers[layer][:2]
        heads, stride = qkv.shape[1] - (0 if params.shared else 2 * kv_heads), qkv.shape[1] * size
        queries = address(qkv, self._dtype, tokens * stride)
        keys = queries + heads * size * qkv.element_size()
        values = keys + kv_heads * size * qkv.element_size()
        projected = _Projected(queries, keys, values, stride, stride)
        return self._attend(layer, projected, tokens, heads, norm, rotary, batch, params, sinks)

    def _attend(
        self,
        layer: int,
        projected: _Projected,
        tokens: int,
        heads: int,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The caller keeps what ``projected`` refers to."""
        (kv_heads, size, latent), dtype, int64 = self._layers[layer], self._dtype, torch.int64
        assert latent is None, "latents are attended to by native decoders"
        rows, table_width = len(batch.q_lens), batch.block_table.shape[1]
        value_norm = norm is not None and len(norm.weight) == heads + 2 * kv_heads
        normed = heads + (0 if params.shared else kv_heads * (1 + value_norm))
        weight = None if norm is None else norm.weight.float().contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        cos, sin = (None, None) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
        rotary_dim = 0 if cos is None else cos.shape[-1]
        out = torch.empty((tokens, heads, size), dtype=dtype)
        arguments = AttendArguments(
            pool=self._pool.handle,
            queries=projected.queries,
            keys=projected.keys,
            values=projected.values,
            query_stride=projected.query_stride,
            kv_stride=projected.kv_stride,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            norm=None if weight is None else address(weight, torch.float32, normed * size),
            value_norm=value_norm,
            shared=params.shared,
            cos=None if cos is None else address(cos, dtype, tokens * rotary_dim),
            sin=None if sin is None else address(sin, dtype, tokens * rotary_dim),
            rotary_dim=rotary_dim,
            kv_pool=self._cells[layer].data_ptr(),
            page_size=self.page_size,
            num_pages=self.num_pages,
            tokens=tokens,
            rows=rows,
            slot_mapping=address(batch.slot_mapping, int64, tokens),
            cu_q=address(batch.cu_q, int64, rows + 1),
            kv_len=address(batch.kv_len, int64, rows),
            block_table=address(batch.block_table, int64, rows * table_width),
            table_width=table_width,
            ends=None if batch.ends is None else address(batch.ends, int64, tokens),
            window=params.window or 0,
            block=params.block,
            spans=params.spans,
            scale=params.scale,
            soft_cap=params.soft_cap or 0.0,
            sinks=None if sinks is None else address(sinks, torch.float32, heads),
            norm_eps=0.0 if norm is None else norm.eps,
            out=out.data_ptr(),
        )
        self._pool.kernels.call(arguments, NUMBERS[dtype])
        return out
