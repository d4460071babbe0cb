"""NativeAttention: the kernels in C++ (``native/source/attention.hpp``) over a pool in their own layout."""

from __future__ import annotations

import ctypes

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from aioinfer.native.bindings import ThreadPool

__all__ = ["NativeAttention", "scoring_numbers"]


def scoring_numbers(params: AttentionParams) -> tuple[float, float, int, int]:
    """As the kernels take it: 0 is no cap and no window."""
    return params.scale, params.soft_cap or 0.0, params.window or 0, params.block


class NativeAttention:
    """See :class:`~aioinfer.model.attention.base.Attention`.

    Page 0 is the null page, as in :class:`~aioinfer.model.attention.pool.KVPool`. How cells lie within a page
    is the kernels' affair (``native/source/pool.hpp``).
    """

    __slots__ = ("_cells", "_head_dim", "_kv_heads", "_pointers", "_team", "page_size")

    def __init__(
        self,
        team: ThreadPool,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._team, self._kv_heads, self._head_dim, self.page_size = team, num_kv_heads, head_dim, page_size
        size = (num_pages + 1) * page_size * num_kv_heads * 2 * head_dim
        self._cells = [torch.zeros(size, dtype=dtype) for _ in range(num_layers)]
        for cells in self._cells:
            team.kernels.call("huge_pages", cells.data_ptr(), cells.nbytes)
        self._pointers = (ctypes.c_void_p * num_layers)(*(cells.data_ptr() for cells in self._cells))

    @property
    def pools(self) -> int:
        """Address of the addresses of all layers' cells."""
        return ctypes.addressof(self._pointers)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        strides = q[0].numel(), k[0].numel()
        return self._attend(layer, (q, k, v), strides, q.shape[1], None, None, batch, params)

    def fused(
        self,
        layer: int,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        rotary: Rotary,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        heads = qkv.shape[1] - 2 * self._kv_heads
        q, k, v = qkv.contiguous().split((heads, self._kv_heads, self._kv_heads), dim=1)
        return self._attend(layer, (q, k, v), (q.stride(0),) * 2, heads, norm, rotary, batch, params)

    def _attend(
        self,
        layer: int,
        projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        strides: tuple[int, int],
        heads: int,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        q, k, v = projected
        out = torch.empty((len(q), heads, self._head_dim), dtype=q.dtype)
        weight = None if norm is None else norm.weight.contiguous()
        cos, sin = (None, None) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
        tables = batch.block_table
        self._team.kernels.call(
            f"attend_{str(q.dtype).removeprefix('torch.')}",
            *(self._team.handle, q.data_ptr(), k.data_ptr(), v.data_ptr(), *strides),
            *(heads, self._kv_heads, self._head_dim),
            *(None if weight is None else weight.data_ptr(), 0.0 if norm is None else norm.eps),
            *(None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr()),
            *(0 if cos is None else cos.shape[-1], self._cells[layer].data_ptr(), self.page_size),
            *(*scoring_numbers(params), len(q), batch.slot_mapping.data_ptr(), len(batch.q_lens)),
            *(batch.cu_q.data_ptr(), batch.kv_len.data_ptr(), tables.data_ptr(), tables.shape[1]),
            out.data_ptr(),
        )
        return out
