"""TritonAttention: attention by Triton kernels, for CUDA.

A layer's call is two to five launches and reads nothing back from the device: one launch stores keys and
values (``fused`` norms and rotates the heads in it), two compute the decode rows by split-KV decode, one or
two compute the other rows by the prefill kernel. All that changes from step to step is read on the device,
and the grids follow from the shapes of the tensors, so all of it can be captured in a CUDA graph.

A decode row has the same bits in any batch. As decode row and as prefill row a token has different bits: the
sums are split differently. So are those of prefill rows that are too few for the device, see
:func:`~aioinfer.model.attention.triton_prefill.choose_splits`. An ``invariant`` attention computes decode
rows by the prefill kernel, too, and divides no keys: a token then has the same bits in any batch, under any
chunking, as decode and as prefill. Its decodes with few rows and long contexts are slow.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVScales
from aioinfer.model.attention.triton_common import kv_arguments, not_finite
from aioinfer.model.attention.triton_decode import DecodeTuning, paged_decode
from aioinfer.model.attention.triton_heads import rotate_and_store
from aioinfer.model.attention.triton_prefill import PrefillTuning, choose_splits, paged_prefill
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from aioinfer.model.triton_float8 import exponent_of, magnitude, shrunk
from aioinfer.model.triton_support import compute_capability

__all__ = ["TritonAttention", "store_kv"]


class TritonAttention:
    """Attention by Triton kernels."""

    __slots__ = ("_decode_tuning", "_invariant", "_pool", "_prefill_tuning", "_warm")

    def __init__(
        self,
        pool: KVPool,
        *,
        decode: DecodeTuning | None = None,
        prefill: PrefillTuning | None = None,
        capability: tuple[int, int] | None = None,
        invariant: bool = False,
    ) -> None:
        """
        Args:
            pool: keys and values.
            decode, prefill: sizes of the launches; by default those that fit the device.
            capability: compute capability that kernels are tuned for; None for the device's.
            invariant: a token has the same bits in any batch, under any chunking and as any kind of row.
        """
        dtype = pool.dtype
        capability = capability or compute_capability(pool.keys[0].device)
        self._pool = pool
        self._invariant = invariant
        #: head sizes of the layers
        dims = [keys.shape[-1] for keys in pool.keys]
        if pool.key_scales:
            self._decode_tuning = [decode or DecodeTuning.of_float8(dtype)] * len(dims)
            self._prefill_tuning = [prefill or PrefillTuning.of_float8(dim, dtype) for dim in dims]
        else:
            self._decode_tuning = [decode or DecodeTuning.of(dim, dtype) for dim in dims]
            self._prefill_tuning = [prefill or PrefillTuning.of(dim, dtype, capability) for dim in dims]
        #: whether, by layer, the kernel that combines splits is compiled
        self._warm = [invariant] * len(dims)

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
        table, kv_len = batch.block_table, batch.kv_len
        decodes = 0 if self._invariant else batch.num_decodes
        if decodes:
            # The only query of a decode row is its last position: it attends to the whole row, for any
            # size of a block.
            paged_decode(
                q[:decodes], keys, values, table[:decodes], kv_len[:decodes],
                scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, out=out[:decodes],
                tuning=self._decode_tuning[layer], scales=scales,
            )  # fmt: skip
        if decodes < len(kv_len):
            self._prefill(layer, q, decodes, batch, params, sinks, out)
        return out

    def _prefill(
        self,
        layer: int,
        q: torch.Tensor,
        decodes: int,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Compute the rows after the first ``decodes`` into their tokens of ``out``."""
        keys, values, table = self._pool.keys[layer], self._pool.values[layer], batch.block_table
        constants: dict[str, Any] = {
            "scale": params.scale, "window": params.window, "soft_cap": params.soft_cap,
            "block": params.block, "sinks": sinks, "tuning": self._prefill_tuning[layer],
            "scales": self._pool.scales(layer),
        }  # fmt: skip
        if not self._warm[layer]:
            # A row without tokens, so that later steps with few rows find all kernels compiled.
            none = torch.zeros(2, dtype=torch.int64, device=q.device)
            paged_prefill(q[:1], keys, values, table[:1], none, none[:1], num_tokens=1, splits=2, **constants)
            self._warm[layer] = True
        paged_prefill(
            q, keys, values, table[decodes:], batch.cu_q[decodes:], batch.kv_len[decodes:],
            num_tokens=len(q) - decodes, out=out,
            splits=self._splits(layer, q, decodes, batch, params.window), **constants,
        )  # fmt: skip

    def _splits(self, layer: int, q: torch.Tensor, decodes: int, batch: Batch, window: int | None) -> int:
        """Number of programs among which the keys of a tile of prefill rows are divided."""
        if self._invariant:
            return 1
        keys, tuning = self._pool.keys[layer], self._prefill_tuning[layer]
        tokens, rows = len(q) - decodes, len(batch.kv_len) - decodes

        def splits(longest: int) -> int:
            seen = longest if window is None else min(longest, window + tuning.block_m)
            padded = not batch.kv_lens
            return choose_splits(tokens, rows, q.shape[1], keys.shape[2], seen, tuning, padded=padded)

        # As wide as the longest context or, captured, as contexts may become: then the host knows no lengths.
        found = splits(batch.block_table.shape[1] * keys.shape[1])
        return splits(max(batch.kv_lens[decodes:])) if found > 1 and batch.kv_lens else found


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
    unknown = not_finite(magnitude(value.to(tl.float32)))
    key = tl.where(unknown, float("nan"), key.to(tl.float32)).to(key.dtype)
    value = tl.where(unknown, 0.0, value)
    if FLOAT8:
        wide_key = key.to(tl.float32)
        wide_value = value.to(tl.float32)
        key_exponent = exponent_of(tl.max(magnitude(wide_key), 1))[:, None]
        value_exponent = exponent_of(tl.max(magnitude(wide_value), 1))[:, None]
        at = cell * HEADS + head
        tl.store(key_scales + at, key_exponent.to(tl.uint8), mask=head < HEADS)
        tl.store(value_scales + at, value_exponent.to(tl.uint8), mask=head < HEADS)
        key = tl.where(key_exponent == 255, 0, shrunk(wide_key, key_exponent, key))
        value = shrunk(wide_value, value_exponent, value)
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
