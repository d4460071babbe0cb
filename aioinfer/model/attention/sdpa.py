"""SDPAAttention: plain torch, on any device. The reference for faster kernels.

Decode rows of similar need go through one batched call; long ones and prefill chunks one by one, each
over exactly its own pages. Grouped queries are folded into the query axis (decode) or spread by a
stride of 0 (prefill), never with ``enable_gqa``, which is several times slower on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.model.attention.pool import KVPool
from aioinfer.model.batch import Batch

__all__ = ["SDPAAttention", "causal_mask"]

#: Elements of gathered keys beyond which copying a batch together costs more than it saves.
_GATHER_LIMIT = 1 << 20
#: Context is rounded up to this, so that the kernel's blocks do not depend on the batch's longest row.
_CONTEXT_MULTIPLE = 16


@dataclass(slots=True)
class _Plan:
    """What all layers of a step share."""

    #: [num_decodes, pages] or None when decodes go one by one
    decode_pages: torch.Tensor | None
    #: additive masks of the decode rows by window, [num_decodes, 1, 1, context]
    decode_masks: dict[int | None, torch.Tensor]
    #: first token of each row, on the host
    starts: list[int]


class SDPAAttention:
    """See :class:`~aioinfer.model.attention.base.Attention`."""

    __slots__ = ("_pool",)

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        self._pool.write(layer, batch.slot_mapping, k, v)
        plan = batch.attention_plan
        if not isinstance(plan, _Plan):
            plan = batch.attention_plan = self._plan(batch, k)
        output = torch.empty_like(q)
        first = 0
        if plan.decode_pages is not None:
            first = batch.num_decodes
            self._decode(layer, q[:first], output[:first], batch, plan, scale, window)
        for row in range(first, len(batch.q_lens)):
            tokens = slice(plan.starts[row], plan.starts[row] + batch.q_lens[row])
            output[tokens] = self._row(layer, q[tokens], k[tokens], v[tokens], batch, row, scale, window)
        return output

    def _plan(self, batch: Batch, k: torch.Tensor) -> _Plan:
        starts = [0]
        for length in batch.q_lens:
            starts.append(starts[-1] + length)
        pages = None
        if batch.num_decodes:
            multiple = max(1, _CONTEXT_MULTIPLE // self._pool.page_size)
            longest = -(-max(batch.kv_lens[: batch.num_decodes]) // self._pool.page_size)
            count = -(-longest // multiple) * multiple
            elements = batch.num_decodes * count * self._pool.page_size * k.shape[1] * k.shape[2]
            if elements <= _GATHER_LIMIT or k.device.type != "cpu":
                pages = batch.block_table[: batch.num_decodes, :count]
                if pages.shape[1] < count:
                    pages = F.pad(pages, (0, count - pages.shape[1]))
        return _Plan(pages, {}, starts)

    def _decode(
        self,
        layer: int,
        q: torch.Tensor,
        output: torch.Tensor,
        batch: Batch,
        plan: _Plan,
        scale: float,
        window: int | None,
    ) -> None:
        """All decode rows at once: keys gathered by page, padded to the longest, masked."""
        assert plan.decode_pages is not None
        rows, num_heads, head_dim = q.shape
        keys = self._pool.keys[layer][plan.decode_pages].flatten(1, 2).transpose(1, 2)
        values = self._pool.values[layer][plan.decode_pages].flatten(1, 2).transpose(1, 2)
        mask = plan.decode_masks.get(window)
        if mask is None:
            mask = _decode_mask(batch.kv_len[:rows], keys.shape[2], window, q.dtype)
            plan.decode_masks[window] = mask
        num_kv_heads = keys.shape[1]
        grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        result = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        output.copy_(result.reshape(rows, num_heads, head_dim))

    def _row(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        row: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """One row of any length over its own pages."""
        q_len, kv_len = batch.q_lens[row], batch.kv_lens[row]
        fresh = q_len == kv_len
        if not fresh:
            pages = batch.block_table[row, : -(-kv_len // self._pool.page_size)]
            k = self._pool.keys[layer][pages].flatten(0, 1)[:kv_len]
            v = self._pool.values[layer][pages].flatten(0, 1)[:kv_len]
        mask = None
        if not fresh or (window is not None and window < kv_len):
            mask = causal_mask(q_len, kv_len, window, q.device)
        num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        group = num_heads // num_kv_heads
        # [num_kv_heads, group, length, head_dim]: kv heads as the batch, their group spread by stride 0.
        queries = q.view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        values = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        result = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return result.permute(2, 0, 1, 3).reshape(q_len, num_heads, head_dim)


def _decode_mask(kv_len: torch.Tensor, context: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where the row's token may look, -inf elsewhere; [rows, 1, 1, context]."""
    position = torch.arange(context, device=kv_len.device)
    allowed = position < kv_len.unsqueeze(1)
    if window is not None:
        allowed &= position >= (kv_len - window).unsqueeze(1)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=kv_len.device)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None, None, :]


def causal_mask(q_len: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a query of the row's last ``q_len`` positions may look; [q_len, kv_len]."""
    query = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    key = torch.arange(kv_len, device=device)
    allowed = key <= query
    if window is not None:
        allowed &= key > query - window
    return allowed
