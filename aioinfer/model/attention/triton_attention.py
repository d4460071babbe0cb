"""TritonAttention: attention by Triton kernels, for CUDA.

A layer's call is two to four launches and reads nothing back from the device: one launch stores keys and
values (``fused`` norms and rotates the heads in it), two compute the decode rows by split-KV decode, one
computes the other rows by the prefill kernel. Whatever changes from step to step is read on the device, and
the grids follow from the shapes of the tensors, so the decode part can be captured in a CUDA graph.

A decode row has the same bits in any batch, and a token of a prompt has the same bits under any chunking. As
decode row and as prefill row a token has different bits: the sums are split differently.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVScales
from aioinfer.model.attention.triton_common import kv_arguments
from aioinfer.model.attention.triton_decode import DecodeTuning, paged_decode
from aioinfer.model.attention.triton_heads import rotate_and_store
from aioinfer.model.attention.triton_prefill import PrefillTuning, paged_prefill
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from aioinfer.model.triton_float8 import exponent_of, magnitude, shrunk

__all__ = ["TritonAttention", "store_kv"]


class TritonAttention:
    """See :class:`~aioinfer.model.attention.base.Attention`."""

    __slots__ = ("_decode", "_pool", "_prefill")

    def __init__(
        self, pool: KVPool, *, decode: DecodeTuning | None = None, prefill: PrefillTuning | None = None
    ) -> None:
        dtype = pool.dtype
        self._pool = pool
        #: of each layer
        self._decode = [decode or DecodeTuning.of(keys.shape[-1], dtype) for keys in pool.keys]
        self._prefill = [prefill or PrefillTuning.of(keys.shape[-1], dtype) for keys in pool.keys]
        if pool.key_scales:
            self._decode = [decode or DecodeTuning.of_float8(dtype)] * len(pool.keys)
            self._prefill = [prefill or PrefillTuning.of_float8(keys.shape[-1], dtype) for keys in pool.keys]

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
        keys, values, scales = self._pool.keys[layer], self._pool.values[layer], self._pool.scales(layer)
        store_kv(k, v, keys, values, batch.slot_mapping, scales)
        return self._attend(layer, q if q.stride(2) == 1 else q.contiguous(), batch, params, sinks)

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
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        q = rotate_and_store(
            qkv, norm, rotary, keys, values, batch.slot_mapping,
            shared=params.shared, scales=self._pool.scales(layer),
        )  # fmt: skip
        return self._attend(layer, q, batch, params, sinks)

    def _attend(
        self, layer: int, q: torch.Tensor, batch: Batch, params: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        scales = self._pool.scales(layer)
        scale, window, soft_cap = params.scale, params.window, params.soft_cap
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        table, kv_len, decodes = batch.block_table, batch.kv_len, batch.num_decodes
        if decodes:
            # The only query of a decode row is its last position: it attends to the whole row, whatever the
            # size of a block.
            paged_decode(
                q[:decodes], keys, values, table[:decodes], kv_len[:decodes],
                scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, out=out[:decodes],
                tuning=self._decode[layer], scales=scales,
            )  # fmt: skip
        if decodes < len(kv_len):
            paged_prefill(
                q, keys, values, table[decodes:], batch.cu_q[decodes:], kv_len[decodes:],
                num_tokens=len(q) - decodes, scale=scale, window=window, soft_cap=soft_cap,
                block=params.block, sinks=sinks, out=out, tuning=self._prefill[layer], scales=scales,
            )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["slot_mapping"])
def _store_kernel(
    k: tl.tensor, v: tl.tensor, keys: tl.tensor, values: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, slot_mapping: tl.tensor,
    stride_k_token: tl.tensor, stride_k_head: tl.tensor, stride_v_token: tl.tensor, stride_v_head: tl.tensor,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    FLOAT8: tl.constexpr,
) -> None:  # fmt: skip
    """Copy one token's keys and values, HEADS x HEAD_DIM each, to its cell, with FLOAT8 rounded. Grid
    (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(slot_mapping + token).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    wanted = (head < HEADS) & (dim < HEAD_DIM)
    to = (cell * HEADS + head) * HEAD_DIM + dim
    key = tl.load(k + token * stride_k_token + head * stride_k_head + dim, mask=wanted, other=0.0)
    value = tl.load(v + token * stride_v_token + head * stride_v_head + dim, mask=wanted, other=0.0)
    if FLOAT8:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        key_exponent = exponent_of(tl.max(magnitude(key), 1))[:, None]
        value_exponent = exponent_of(tl.max(magnitude(value), 1))[:, None]
        at = cell * HEADS + head
        tl.store(key_scales + at, key_exponent.to(tl.uint8), mask=head < HEADS)
        tl.store(value_scales + at, value_exponent.to(tl.uint8), mask=head < HEADS)
        key = shrunk(key, key_exponent)
        value = shrunk(value, value_exponent)
    tl.store(keys + to, key, mask=wanted)
    tl.store(values + to, value, mask=wanted)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write k and v [T, num_kv_heads, head_dim] to cells [T] of keys and values [pages, page_size, ...].

    k and v may be slices of one projection; keys and values must be contiguous, else ValueError. If several
    tokens have the same cell (padding has), an arbitrary one is kept. ``scales``: of a pool of 8 bits.
    """
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("the pool must be contiguous")
    k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (k, v))
    tokens, heads, head_dim = k.shape
    _store_kernel[(tokens,)](
        k, v, *kv_arguments(keys, values, scales), slot_mapping, *k.stride()[:2], *v.stride()[:2],
        HEADS=heads, BLOCK_H=triton.next_power_of_2(heads), HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), FLOAT8=scales is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
