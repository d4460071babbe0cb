"""SDPAAttention: torch's scaled_dot_product_attention, on any device. The reference for faster kernels.

Rows whose tokens all attend to the same positions (decodes, and blocks of a diffusion model) are computed in
batched calls over gathered keys and values, together with rows of the same length. The other rows (prefill
chunks, and all rows with tokens of images that see each other both ways) are computed one by one. A row
gathers cells of its own sequence only: the padding of a batched call repeats the row's own last cell under
the mask. Values of other requests in the pool, NaN included, are never read.

Contexts are rounded up to a multiple of 16 and masked: the result of a row then has the same bits alone,
in any batch and in any grouping (measured on the CPU for head sizes that are multiples of 16). Grouped
queries are folded into the query axis (batched) or spread by a stride of 0 (one by one), never with
``enable_gqa``, which is several times slower on the CPU.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.model.attention.base import AttentionParams, LatentHeads
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm, split_heads
from aioinfer.model.rope import Rotary

__all__ = ["SDPAAttention", "visible"]

_CONTEXT_MULTIPLE = 16
#: The most elements of keys that one batched call gathers, by device type. On a CPU they should stay in its
#: caches (measured: within 10% of the best from 2^18 to 2^20); a GPU is faster with few calls.
_GROUP_LIMIT = {"cpu": 1 << 19}
_GROUP_LIMIT_ELSEWHERE = 1 << 28
#: Rows of several tokens multiply their padding too: their groups are smaller by this factor (measured on the
#: CPU with 64 rows of 16 tokens: a fifth less time).
_LONG = 4
#: Elements of the largest gather that reuses memory: allocating megabytes per call faults in their pages each
#: time.
_SCRATCH_LIMIT = 1 << 22


@dataclass(slots=True)
class _Context:
    """The KV cells that a call reads, and the buffers that it gathers them into.

    All calls of a step share the buffers, one after the other: their content is valid until the next gather.
    """

    #: [n] KV cells
    cells: torch.Tensor
    #: [n, num_kv_heads, head_dim]; values of latents are views of the keys
    keys: torch.Tensor
    values: torch.Tensor

    def gather(self, pool: KVPool, layer: int) -> None:
        torch.index_select(pool.key_cells[layer], 0, self.cells, out=self.keys)
        if pool.layers[layer].value_dim is None:
            torch.index_select(pool.value_cells[layer], 0, self.cells, out=self.values)


@dataclass(slots=True)
class _Group:
    """Rows of equal length that share one call."""

    #: indices of their tokens in the batch, row by row
    tokens: slice | torch.Tensor
    #: number of rows
    count: int
    context: _Context
    #: the context's buffers as [count, num_kv_heads, context, head_dim]
    keys: torch.Tensor
    values: torch.Tensor
    #: additive, [count, 1, 1, context]: 0, or -inf over the padding
    mask: torch.Tensor


@dataclass(slots=True)
class _Chunk:
    """A row whose tokens attend to different positions."""

    tokens: slice
    #: None if the chunk is its whole context, whose keys and values are at hand
    context: _Context | None
    #: bool [q_len, context], True where a query attends to a key; None if causal or without any mask
    mask: torch.Tensor | None
    causal: bool = False


@dataclass(slots=True)
class _Plan:
    """The work of one step, for all layers with the same params and shape of keys."""

    groups: list[_Group]
    chunks: list[_Chunk]


class SDPAAttention:
    """Attention by torch, one forward at a time."""

    __slots__ = ("_pool", "_scratch")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        keys = pool.keys[0]
        on_cpu = keys.device.type == "cpu"
        # On a CPU, memory that no gather reaches is never touched and costs nothing.
        self._scratch = [keys.new_empty(_SCRATCH_LIMIT if on_cpu else 0) for _ in range(2)]

    @property
    def page_tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers, [pages, ...]."""
        return self._pool.stores

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
        if not params.shared:
            self._pool.write(layer, batch.slot_mapping, k, v)
        plan = self._planned(layer, batch, params)
        if len(plan.groups) == 1 and not plan.chunks:
            return self._together(layer, q, plan.groups[0], params, sinks)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in plan.groups:
            output[group.tokens] = self._together(layer, q[group.tokens], group, params, sinks)
        for chunk in plan.chunks:
            at = chunk.tokens
            seen = self._seen(layer, k[at], v[at], chunk)
            output[at] = self._prefill(q[at], *seen, chunk, params, sinks)
        return output

    def latent(
        self,
        layer: int,
        q: torch.Tensor,
        latents: torch.Tensor,
        heads: LatentHeads,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention over latents, [T, num_heads, value_dim]: of decodes, and of short chunks, in the space of
        latents, of long ones over the heads' own keys and values.

        Args:
            q: [T, num_heads, query_dim], rotated.
            latents: [T, 1, width] of the same tokens.
        """
        self._pool.write(layer, batch.slot_mapping, latents, latents)
        plan, parts = self._planned(layer, batch, params), []
        for group in plan.groups:
            mixed = self._together(layer, heads.absorbed(q[group.tokens]), group, params, None)
            parts.append((group.tokens, heads.results(mixed)))
        for chunk in plan.chunks:
            own, new = q[chunk.tokens], latents[chunk.tokens]
            k, v = self._seen(layer, new, new[..., : self._pool.layers[layer].value_dim], chunk)
            if chunk.context is None or heads.expands(len(own)):
                mixed = self._prefill(own, *heads.expanded(k), chunk, params, None)
            else:
                mixed = heads.results(self._prefill(heads.absorbed(own), k, v, chunk, params, None))
            parts.append((chunk.tokens, mixed))
        if len(parts) == 1:
            return parts[0][1]
        output = q.new_empty(len(q), q.shape[1], parts[0][1].shape[-1]) if parts else q
        for tokens, mixed in parts:
            output[tokens] = mixed
        return output

    def _planned(self, layer: int, batch: Batch, params: AttentionParams) -> _Plan:
        plans, shape = batch.attention_plan, self._pool.layers[layer]
        if not isinstance(plans, dict):
            plans = batch.attention_plan = {}
        plan: _Plan | None = plans.get((params, shape))
        if plan is None:
            make = self._plan if batch.canvas is None else self._plan_canvases
            plan = plans[params, shape] = make(batch, params, shape)
        return plan

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
        kv_heads = 0 if params.shared else self._pool.keys[layer].shape[2]
        q, k, v = split_heads(qkv, kv_heads, norm, rotary)
        return self(layer, q, k, v, batch, params, sinks)

    def _together(
        self, layer: int, q: torch.Tensor, group: _Group, params: AttentionParams, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        group.context.gather(self._pool, layer)
        count, num_kv_heads, _, head_dim = group.keys.shape
        if len(q) == count:
            # The general case below makes four views of views more, which is measurable in a decode.
            queries = q.view(count, num_kv_heads, -1, head_dim)
            sink = None if sinks is None else sinks.view(num_kv_heads, -1)
            mixed = _mix(queries, group.keys, group.values, group.mask, params, sink)
            return mixed.reshape(*q.shape[:2], -1)
        # [rows, num_kv_heads, tokens, queries of a group, head_dim]: queries with common keys are adjacent.
        queries = q.view(count, len(q) // count, num_kv_heads, -1, head_dim).transpose(1, 2)
        folded = queries.reshape(count, num_kv_heads, -1, head_dim)
        sink = None if sinks is None else sinks.view(num_kv_heads, -1).repeat(1, queries.shape[2])
        mixed = _mix(folded, group.keys, group.values, group.mask, params, sink)
        return mixed.view(*queries.shape[:-1], -1).transpose(1, 2).reshape(*q.shape[:2], -1)

    def _seen(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, chunk: _Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a chunk, and of what is in front of it."""
        if chunk.context is None:
            return k, v
        chunk.context.gather(self._pool, layer)
        return chunk.context.keys, chunk.context.values

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk: _Chunk,
        params: AttentionParams,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        q_len, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        # [num_kv_heads, group, length, head_dim]: KV heads are the batch, expanded over their group.
        queries = q.view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        values = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        sink = None if sinks is None else sinks.view(num_kv_heads, group, 1)
        mixed = _mix(queries, keys, values, chunk.mask, params, sink, causal=chunk.causal)
        if (chunk.causal or chunk.mask is not None) and not mixed.isfinite().all():
            # torch multiplies values that a query does not see by 0, and adds -inf to their scores: NaN among
            # them becomes the result of queries that do not see it.
            finite = (k.isfinite() & v.isfinite()).all(-1).T
            keys, values = (each.masked_fill(~finite[:, None, :, None], 0) for each in (keys, values))
            apart = _mix(queries, keys, values, chunk.mask, params, sink, causal=chunk.causal)
            seen = visible(q_len, 0, q_len, params, q.device) if chunk.mask is None else chunk.mask
            mixed = torch.where((seen & ~finite[:, None]).any(-1)[:, None, :, None], mixed, apart)
        return mixed.permute(2, 0, 1, 3).reshape(q_len, num_heads, -1)

    def _plan(self, batch: Batch, params: AttentionParams, shape: KVShape) -> _Plan:
        window, block = params.window, params.block
        starts = list(itertools.accumulate(batch.q_lens, initial=0))
        spans = _with_spans(batch, starts) if params.spans else frozenset()
        # Rows by their length, and the rows whose tokens attend to different positions.
        alike: dict[int, list[int]] = {1: list(range(batch.num_decodes))}
        mixed: list[int] = []
        for row in range(batch.num_decodes, len(batch.q_lens)):
            q_len, kv_len = batch.q_lens[row], batch.kv_lens[row]
            one_block = (kv_len - q_len) // block == (kv_len - 1) // block
            if row not in spans and (q_len == 1 or (one_block and (window is None or window >= kv_len))):
                alike.setdefault(q_len, []).append(row)
            else:
                mixed.append(row)
        width = shape.num_kv_heads * shape.head_dim
        device_type = self._pool.keys[0].device.type
        groups = []
        for q_len, rows in alike.items():
            contexts = [batch.kv_lens[row] for row in rows]
            if window is not None:
                contexts = [min(context, window) for context in contexts]
            for members, context in _groups(contexts, width * (1 if q_len == 1 else _LONG), device_type):
                groups.append(([rows[member] for member in members], context))
        # The first token of a chunk attends to the earliest position, the last one ends the context.
        reaches = [
            min(batch.kv_lens[row], batch.kv_lens[row] if window is None else batch.q_lens[row] - 1 + window)
            for row in mixed
        ]
        needed = max([len(rows) * context for rows, context in groups] + reaches)
        buffers = self._buffers(needed * width)
        return _Plan(
            [
                self._plan_group(batch, rows, starts, context, window, shape, buffers)
                for rows, context in groups
            ],
            [
                self._plan_chunk(
                    batch,
                    row,
                    slice(starts[row], starts[row + 1]),
                    reach,
                    params,
                    shape,
                    buffers,
                    spans=row in spans,
                )
                for row, reach in zip(mixed, reaches, strict=True)
            ],
        )

    def _plan_canvases(self, batch: Batch, params: AttentionParams, shape: KVShape) -> _Plan:
        """Row by row: which tokens see what comes after them, only the device knows."""
        canvas, window, chunks = batch.canvas, params.window, []
        assert canvas is not None
        rows = list(zip(itertools.accumulate(batch.q_lens), batch.q_lens, batch.kv_lens, strict=True))
        firsts = [0 if window is None else max(0, kv - length + 1 - window) for _, length, kv in rows]
        needed = max(kv - first for first, (_, _, kv) in zip(firsts, rows, strict=True))
        buffers = self._buffers(needed * shape.num_kv_heads * shape.head_dim)
        for row, (first, (stop, length, kv)) in enumerate(zip(firsts, rows, strict=True)):
            at = slice(stop - length, stop)
            positions = torch.arange(first, kv, device=batch.block_table.device)
            seen = positions < canvas.ends[at].unsqueeze(1)
            if window is not None:
                seen &= positions > canvas.anchors[at].unsqueeze(1) - window
            table = batch.block_table[row : row + 1]
            chunks.append(_Chunk(at, self._context(table, positions.unsqueeze(0), shape, buffers), seen))
        return _Plan([], chunks)

    def _buffers(self, elements: int) -> list[torch.Tensor]:
        """Memory to gather so many elements of keys, and of values."""
        if elements <= len(self._scratch[0]):
            return self._scratch
        return [buffer.new_empty(elements) for buffer in self._scratch]

    def _plan_group(
        self,
        batch: Batch,
        rows: list[int],
        starts: list[int],
        context: int,
        window: int | None,
        shape: KVShape,
        buffers: list[torch.Tensor],
    ) -> _Group:
        device, count, q_len = batch.kv_len.device, len(rows), batch.q_lens[rows[0]]
        if rows == list(range(rows[0], rows[0] + count)):
            chosen: slice | torch.Tensor = slice(rows[0], rows[0] + count)
            tokens: slice | torch.Tensor = slice(starts[rows[0]], starts[rows[-1] + 1])
        else:
            chosen = torch.tensor(rows, device=device)
            tokens = torch.tensor([starts[row] for row in rows], device=device)
            tokens = (tokens[:, None] + torch.arange(q_len, device=device)).flatten()
        kv_len = batch.kv_len[chosen].unsqueeze(1)
        positions = torch.arange(context, device=device).expand(count, -1)
        if window is not None:
            positions = positions + (kv_len - window).clamp_min_(0)
        mask = torch.zeros(positions.shape, dtype=buffers[0].dtype, device=device)
        mask.masked_fill_(positions >= kv_len, float("-inf"))
        # Padding repeats the row's own last cell, which this step has written.
        found = self._context(batch.block_table[chosen], torch.minimum(positions, kv_len - 1), shape, buffers)
        keys, values = (
            buffer.view(*positions.shape, *buffer.shape[1:]).transpose(1, 2)
            for buffer in (found.keys, found.values)
        )
        return _Group(tokens, count, found, keys, values, mask[:, None, None, :])

    def _plan_chunk(
        self,
        batch: Batch,
        row: int,
        tokens: slice,
        reach: int,
        params: AttentionParams,
        shape: KVShape,
        buffers: list[torch.Tensor],
        *,
        spans: bool,
    ) -> _Chunk:
        """``reach`` is the number of positions that any of the chunk's queries attends to."""
        q_len, kv_len = batch.q_lens[row], batch.kv_lens[row]
        first, whole = kv_len - reach, q_len == kv_len
        context, device = None, batch.block_table.device
        if not whole or params.shared:
            positions = torch.arange(first, kv_len, device=device).unsqueeze(0)
            context = self._context(batch.block_table[row : row + 1], positions, shape, buffers)
        ends = batch.ends[tokens] if spans and batch.ends is not None else None
        if ends is None and (params.window is None or params.window >= kv_len):
            if (kv_len - q_len) // params.block == (kv_len - 1) // params.block:
                return _Chunk(tokens, context, None)
            if whole and params.block == 1:
                return _Chunk(tokens, context, None, causal=True)
        return _Chunk(tokens, context, visible(q_len, first, kv_len, params, device, ends))

    def _context(
        self, tables: torch.Tensor, positions: torch.Tensor, shape: KVShape, buffers: list[torch.Tensor]
    ) -> _Context:
        """The KV cells of positions [rows, n], from page tables [rows, P]."""
        size = self._pool.page_size
        pages = tables.gather(1, torch.div(positions, size, rounding_mode="floor"))
        cells = (pages * size + positions % size).flatten()
        every = (len(cells), shape.num_kv_heads, shape.head_dim)
        keys, values = (buffer[: math.prod(every)].view(every) for buffer in buffers)
        return _Context(cells, keys, values if shape.value_dim is None else keys[..., : shape.value_dim])


def _groups(contexts: list[int], width: int, device_type: str) -> list[tuple[list[int], int]]:
    """Divide rows among calls, similar contexts together, so that little padding is gathered.

    Args:
        contexts: positions that each row attends to.
        width: elements of one position's keys.
        device_type: selects the size limit of a call.

    Returns:
        for each call, the indices of its rows and its padded context
    """
    limit = _GROUP_LIMIT.get(device_type, _GROUP_LIMIT_ELSEWHERE)
    padded = [-(-context // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE for context in contexts]
    if len(padded) * max(padded, default=0) * width <= limit:
        return [(list(range(len(padded))), max(padded))] if padded else []
    groups: list[tuple[list[int], int]] = []
    members: list[int] = []
    for row in sorted(range(len(padded)), key=padded.__getitem__):
        if members and (len(members) + 1) * padded[row] * width > limit:
            groups.append((members, padded[members[-1]]))
            members = []
        members.append(row)
    groups.append((members, padded[members[-1]]))
    return groups


def _with_spans(batch: Batch, starts: list[int]) -> frozenset[int]:
    """The rows with tokens that see beyond themselves. Waits for the device."""
    if batch.ends is None:
        return frozenset()
    tokens = (batch.ends > batch.positions + 1).nonzero().flatten().tolist()
    return frozenset(bisect.bisect_right(starts, token) - 1 for token in tokens)


def visible(
    q_len: int,
    first: int,
    stop: int,
    params: AttentionParams,
    device: torch.device,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention mask of the last ``q_len`` of positions [first, stop): bool [q_len, stop - first], True where
    the query attends to the key. ``ends``: int64 [q_len], the ends of the spans that they are in."""
    query = torch.arange(stop - q_len, stop, device=device).unsqueeze(1)
    key = torch.arange(first, stop, device=device)
    behind = (query // params.block + 1) * params.block
    if ends is not None:
        behind = torch.maximum(behind, ends.unsqueeze(1))
    allowed = key < behind
    if params.window is not None:
        allowed &= key > query - params.window
    return allowed


def _mix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    params: AttentionParams,
    sink: torch.Tensor | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Softmax attention over [..., length, head_dim]; ``mask`` is additive or bool, ``sink`` [..., length]
    has the score of one more position of each query."""
    if params.soft_cap is None and sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=params.scale)
    # torch's kernels have neither soft cap nor sinks.
    scores = q.float() @ k.float().mT * params.scale
    if params.soft_cap is not None:
        scores = (scores / params.soft_cap).tanh() * params.soft_cap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sink is not None:
        scores = torch.cat((scores, sink[..., None].float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights @ v.float()).to(q.dtype)
