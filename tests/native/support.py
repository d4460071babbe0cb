"""Random problems for native kernels, and their results by the formula in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm, split_heads
from aioinfer.model.rope import Rotary
from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from tests.model.harness import attention_for, build_batch, fill, row_states, state_pool

DTYPES = [torch.float32, torch.bfloat16]
#: largest relative error of one rounding
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(slots=True)
class Heads:
    """The heads of a layer and the parameters of its attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scoring: AttentionParams
    norm: HeadNorm | None = None
    #: rotated dimensions; 0: none
    rotary_dim: int = 0
    sinks: torch.Tensor | None = None

    @classmethod
    def draw(cls, rng: random.Random, dtype: torch.dtype, **fixed: Any) -> Heads:
        """Random heads, with or without blocks, windows, norms and rotary embedding."""
        group, kv_heads = rng.choice([1, 2, 3, 4, 5, 7, 8, 14, 15, 16]), rng.choice([1, 2, 3])
        head_dim = rng.choice([16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
        window = rng.choice([None, None, 1, 2, 7, 16, 40, 127, 129])
        scoring = AttentionParams(
            scale=head_dim**-0.5,
            window=window,
            soft_cap=rng.choice([None, None, 3.0]),
            block=rng.choice([1, 1, 2, 4, 8, 32]),
        )
        weight = 1 + 0.3 * normal((group + 1) * kv_heads, head_dim, seed=3)
        norm = HeadNorm(weight.to(dtype), rng.choice([1e-6, 0.3]))
        rotary = rng.choice([head_dim, head_dim, head_dim // 2, 10, 2, 0])
        sinks = rng.choice([None, None, 2 * normal(group * kv_heads, seed=4)])
        values: dict[str, Any] = {
            "norm": rng.choice([norm, None]),
            "rotary_dim": rotary,
            "scoring": scoring,
            "sinks": sinks,
        }
        values |= fixed
        return cls(group * kv_heads, kv_heads, head_dim, dtype, **values)

    @property
    def width(self) -> int:
        return self.heads + 2 * self.kv_heads

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Factors of the tokens at these positions."""
        exponents = torch.arange(0, self.rotary_dim, 2) / max(self.rotary_dim, 1)
        angles = positions[:, None, None] * 100.0**-exponents
        sin = torch.cat((-angles.sin(), angles.sin()), -1)
        return Rotary(torch.cat((angles, angles), -1).cos().to(self.dtype), sin.to(self.dtype))


@dataclass(slots=True)
class Row:
    """A sequence of projected tokens, of which a step computes those from ``start`` on."""

    qkv: torch.Tensor
    start: int
    pages: list[int] = field(default_factory=list)
    #: (start, end) of positions that see each other both ways
    spans: Sequence[tuple[int, int]] = ()

    @property
    def ends(self) -> torch.Tensor:
        """The end of the span that a position is in, or of itself."""
        ends = torch.arange(1, len(self.qkv) + 1)
        for start, stop in self.spans:
            ends[start:stop] = stop
        return ends


def draw_rows(rng: random.Random, heads: Heads, count: int, longest: int = 300) -> list[Row]:
    """Decodes, chunks and whole prompts, from boundaries of blocks on."""
    rows = []
    for _ in range(count):
        length = rng.choice([1, 2, 3, 15, 16, 17, rng.randint(1, 140), rng.randint(1, longest)])
        start = rng.choice([length - 1, length - 1, 0, rng.randrange(length)])
        start = start // heads.scoring.block * heads.scoring.block
        seed = rng.randrange(1 << 30)
        qkv = normal(length, heads.width, heads.head_dim, seed=seed, dtype=heads.dtype)
        rows.append(Row(qkv, start))
    return rows


class Bench:
    """Attention over a KV pool in which everything that no row owns is NaN."""

    def __init__(self, heads: Heads, page_size: int, *, threads: int = 2, seed: int = 0) -> None:
        self.heads, self.page_size = heads, page_size
        self.pool: ThreadPool = shared_thread_pool(threads)
        pages = 5000 // page_size + 20
        self.attention = NativeAttention(
            self.pool,
            [KVShape(heads.kv_heads, heads.head_dim)],
            num_pages=pages,
            page_size=page_size,
            dtype=heads.dtype,
        )
        fill(self.attention, float("nan"))
        self._free = list(range(1, pages + 1))
        random.Random(seed).shuffle(self._free)

    def deal(self, rows: Sequence[Row]) -> None:
        """Assign pages to rows, in random order."""
        for row in rows:
            row.pages = [self._free.pop() for _ in range(-(-len(row.qkv) // self.page_size))]

    def batch(self, parts: Sequence[tuple[Row, int, int]]) -> Batch:
        """A step of positions [from, to) of rows."""
        table = [([0] * (stop - start), start, row.pages) for row, start, stop in parts]
        batch = build_batch(table, self.page_size, num_decodes=0)
        if any(row.spans for row, _, _ in parts):
            batch.ends = torch.cat([row.ends[start:stop] for row, start, stop in parts])
        return batch

    def step(self, parts: Sequence[tuple[Row, int, int]], *, fused: bool = True) -> list[torch.Tensor]:
        """Results [to - from, heads, head_dim] of each part."""
        heads, batch = self.heads, self.batch(parts)
        qkv = torch.cat([row.qkv[start:stop] for row, start, stop in parts])
        rotary, sinks = heads.rotary(batch.positions) if heads.rotary_dim else None, heads.sinks
        if fused:
            got = self.attention.fused(0, qkv.clone(), heads.norm, rotary, batch, heads.scoring, sinks)
        else:
            kv, scoring = heads.kv_heads, heads.scoring
            q, k, v = qkv.split((heads.heads, kv, kv), 1)
            got = self.attention(0, q, k, v, batch, scoring, sinks)
        return list(got.split([stop - start for _, start, stop in parts]))

    def past(self, rows: Sequence[Row], *, fused: bool = True) -> None:
        """Store the keys and values of the positions before each row's step."""
        parts = [(row, 0, row.start) for row in rows if row.start]
        if parts:
            self.step(parts, fused=fused)

    def run(self, rows: Sequence[Row], *, fused: bool = True) -> list[torch.Tensor]:
        """One step of all rows, on new pages."""
        self.deal(rows)
        self.past(rows, fused=fused)
        return self.step([(row, row.start, len(row.qkv)) for row in rows], fused=fused)


def expected(heads: Heads, row: Row, *, fused: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of attention, and the same with absolute values; both [tokens, heads, head_dim]."""
    scoring, length = heads.scoring, len(row.qkv)
    qkv, at = row.qkv.double(), torch.arange(length)
    if fused:
        rotary = heads.rotary(at)
        norm = None if heads.norm is None else HeadNorm(heads.norm.weight.double(), heads.norm.eps)
        exact = Rotary(rotary.cos.double(), rotary.sin.double()) if heads.rotary_dim else None
        q, k, v = split_heads(qkv, heads.kv_heads, norm, exact)
    else:
        q, k, v = qkv.split((heads.heads, heads.kv_heads, heads.kv_heads), 1)
    group = heads.heads // heads.kv_heads
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("thd,nhd->htn", q[row.start :], k) * scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    own, block = at[row.start :, None], scoring.block
    seen = at < (own // block + 1) * block
    if scoring.spans:
        seen |= at < row.ends[row.start :, None]
    if scoring.window is not None:
        seen &= at > own - scoring.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if heads.sinks is not None:
        sinks = heads.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("htn,nhd->thd", weights, v), torch.einsum("htn,nhd->thd", weights, v.abs())


def prompt_logits(model: Any) -> torch.Tensor:
    """Logits of all tokens of a prompt."""
    ids = [(7 * i + 3) % 100 for i in range(40)]
    states = row_states(state_pool(model.spec, 1), [(0, 1)])
    batch = build_batch([(ids, 0, [1, 2, 3])], 16, num_decodes=0, logits_rows=range(40), states=states)
    logits: torch.Tensor = model.forward(batch, attention_for(model.spec, 5, 16, "native"))
    return logits
