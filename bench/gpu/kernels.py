"""Attention kernels: GB/s of decode and TFLOP/s of prefill, as shares of copy and matmul in the same run.

``triton`` are this package's paged kernels over shuffled pages, ``small`` the same over pages of 16, which
take a look-up per position, ``wide`` with a page table as wide as decode graphs have it for the longest
context, ``sdpa`` is torch's own over contiguous keys and values,
which no engine has. The bytes are those of keys and values, the operations those that causality leaves.
Every call of a timed decode reads other memory, as many calls as it takes to overflow the caches. First the
decode kernel's results are compared with float32.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu.measure import measure_peaks, seconds_per_call
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.roofline import Peaks, Shape
from bench.gpu.shapes import SHAPES

__all__ = ["prefill_flops", "run"]

#: positions of a page as engines have it on CUDA, and of a small one
_PAGE, _SMALL_PAGE = 64, 16
#: bytes of keys and values that the calls of a graph read between them; the L2 of an H200 holds 50 MB
_COLD = 1 << 29
_MOST_CALLS = 32
#: root mean square of the difference to float32, as a part of the result's; bf16 alone makes 0.003
_TOLERANCE = 0.02


@dataclass
class Pool:
    """Keys and values in pages, of which any case takes as many as it needs, from anywhere."""

    keys: torch.Tensor
    values: torch.Tensor
    order: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @classmethod
    def make(cls, plan: Plan, shape: Shape, device: torch.device, page_size: int = _PAGE) -> Pool:
        size = plan.size
        prefills = [(rows, context) for rows, _, context in size.prefills]
        pages = max(
            rows * -(-context // page_size) for rows, context in [*size.decodes, *prefills, size.checked]
        )
        if device.type == "cuda":
            pages = max(pages, _COLD // (page_size * shape.kv_heads * shape.head_dim * 2 * 2))
        kv_shape = (pages, page_size, shape.kv_heads, shape.head_dim)
        dtype = getattr(torch, plan.dtype)
        keys, values = (torch.empty(kv_shape, dtype=dtype, device=device).normal_() for _ in range(2))
        return cls(keys, values, torch.randperm(pages, device=device))

    def tables(self, rows: int, context: int) -> list[torch.Tensor]:
        """Page tables [rows, pages of the context] that share no page, as many as keep the caches cold."""
        width = -(-context // self.page_size)
        bytes_each = 2 * rows * width * self.keys[0].nbytes
        count = min(_MOST_CALLS, max(1, _COLD // bytes_each), len(self.order) // (rows * width))
        return [table.view(rows, width) for table in self.order[: count * rows * width].chunk(count)]

    def contiguous(self, at: int, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Part ``at`` of the same memory as keys and values [rows, kv_heads, context, head_dim]."""
        cells = [store.flatten(0, 1) for store in (self.keys, self.values)]
        first = at * rows * context % (len(cells[0]) - rows * context + 1)
        keys, values = (
            part[first : first + rows * context].view(rows, context, *part.shape[1:]).transpose(1, 2)
            for part in cells
        )
        return keys, values


def prefill_flops(shape: Shape, rows: int, queries: int, context: int) -> int:
    """Operations of one layer: each query sees what stands before it, and itself."""
    seen = queries * context - queries * (queries - 1) // 2
    return 4 * shape.heads * shape.head_dim * rows * seen


def run(plan: Plan, report: PartReport) -> None:
    """A row per kernel, heads and case."""
    from aioinfer.execution.cuda_device import pick_device

    torch.manual_seed(0)
    device = pick_device(plan.device)
    peaks = measure_peaks(plan, device, report)
    shapes = [SHAPES[name] for name in plan.size.heads]
    pool = Pool.make(plan, shapes[0], device)
    small = Pool.make(plan, shapes[0], device, _SMALL_PAGE)
    for shape in shapes:
        report.guarded(f"check {shape.name}", lambda shape=shape: _check(plan, shape, pool, report))
    for rows, context in plan.size.decodes:
        for shape in shapes:
            report.guarded(
                f"decode {shape.name} {rows} x {context}",
                lambda *case: _decode(plan, pool, small, peaks, report, *case), shape, rows, context,
            )  # fmt: skip
    for shape in shapes:
        for rows, queries, context in plan.size.prefills:
            report.guarded(
                f"prefill {shape.name} {rows} x {queries} of {context}",
                lambda *case: _prefill(pool, peaks, report, *case), shape, rows, queries, context,
            )  # fmt: skip


def _queries(pool: Pool, shape: Shape, tokens: int) -> torch.Tensor:
    q = torch.empty(tokens, shape.heads, shape.head_dim, dtype=pool.keys.dtype, device=pool.keys.device)
    return q.normal_()


def _lengths(pool: Pool, rows: int, context: int) -> torch.Tensor:
    return torch.full((rows,), context, device=pool.keys.device)


def _check(plan: Plan, shape: Shape, pool: Pool, report: PartReport) -> None:
    """Raises ArithmeticError if what a kernel makes of rows of random lengths is not what it should be."""
    from aioinfer.model.attention.triton_decode import paged_decode
    from aioinfer.model.attention.triton_prefill import paged_prefill

    rows, context = plan.size.checked
    table = pool.tables(rows, context)[0]
    rng = random.Random(0)
    lengths = [context, *(rng.randint(1, context) for _ in range(rows - 1))]
    counts = [rng.randint(1, length) for length in lengths]
    ends = torch.tensor([0, *counts], device=table.device).cumsum(0)
    q = _queries(pool, shape, sum(counts))
    given = (pool.keys, pool.values, table)
    kv_len, scale = torch.tensor(lengths, device=table.device), shape.head_dim**-0.5
    expected = torch.cat([
        _reference(pool, queries, table[row], length, scale)
        for row, (queries, length) in enumerate(zip(q.split(counts), lengths, strict=True))
    ])  # fmt: skip
    last = ends[1:] - 1
    results = {
        "decode": (paged_decode(q[last], *given, kv_len, scale=scale), expected[last]),
        "prefill": (paged_prefill(q, *given, ends, kv_len, num_tokens=len(q), scale=scale), expected),
    }
    for name, (got, wanted) in results.items():
        error = float((got.float() - wanted).norm() / wanted.norm())
        report.row(case=f"check {name}", heads=f"{shape.heads}/{shape.kv_heads}", error=error)
        # Written so that NaN fails.
        if not error < _TOLERANCE:
            raise ArithmeticError(f"{name} with heads of {shape.name} is wrong by {error:.2g} of its result")


def _reference(pool: Pool, q: torch.Tensor, pages: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """Causal attention of the last positions of a row in float32, [queries, heads, head_dim]."""
    keys, values = (
        store[pages].flatten(0, 1)[:length].float().repeat_interleave(q.shape[1] // store.shape[2], dim=1)
        for store in (pool.keys, pool.values)
    )
    scores = torch.einsum("qhd,nhd->hqn", q.float(), keys) * scale
    hidden = torch.ones(len(q), length, dtype=torch.bool, device=q.device).triu(length - len(q) + 1)
    return torch.einsum("hqn,nhd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def _decode(
    plan: Plan,
    pool: Pool,
    small: Pool,
    peaks: Peaks,
    report: PartReport,
    shape: Shape,
    rows: int,
    context: int,
) -> None:
    from aioinfer.model.attention.triton_decode import paged_decode

    q = _queries(pool, shape, rows)
    kv_len, scale = _lengths(pool, rows, context), shape.head_dim**-0.5
    tables = pool.tables(rows, context)
    wide = [F.pad(table, (0, plan.size.widest // _PAGE - table.shape[1])) for table in tables]
    grouped = q.view(rows, shape.kv_heads, -1, shape.head_dim)
    contiguous = [pool.contiguous(at, rows, context) for at in range(len(tables))]

    def paged(pool: Pool, tables: list[torch.Tensor]) -> list[Callable[[], object]]:
        return [
            partial(paged_decode, q, pool.keys, pool.values, table, kv_len, scale=scale) for table in tables
        ]

    ways: dict[str, list[Callable[[], object]]] = {
        "triton": paged(pool, tables),
        "small": paged(small, small.tables(rows, context)),
        "wide": paged(pool, wide),
        "sdpa": [
            partial(F.scaled_dot_product_attention, grouped, keys, values, scale=scale)
            for keys, values in contiguous
        ],
    }
    moved = 2 * rows * context * shape.kv_heads * shape.head_dim * q.element_size()
    for name, calls in ways.items():
        seconds, how = seconds_per_call(calls, q.device)
        report.row(
            case=f"decode {name}", heads=f"{shape.heads}/{shape.kv_heads}", rows=rows, context=context,
            us=1e6 * seconds, gb_per_s=moved / seconds / 1e9,
            share=moved / seconds / peaks.bandwidth, how=how,
        )  # fmt: skip


def _prefill(
    pool: Pool, peaks: Peaks, report: PartReport, shape: Shape, rows: int, queries: int, context: int
) -> None:
    from aioinfer.model.attention.triton_prefill import paged_prefill

    q = _queries(pool, shape, rows * queries)
    scale = shape.head_dim**-0.5
    table, kv_len = pool.tables(rows, context)[0], _lengths(pool, rows, context)
    cu_q = torch.arange(rows + 1, device=q.device) * queries
    ways: dict[str, Callable[[], object]] = {
        "triton": lambda: paged_prefill(
            q, pool.keys, pool.values, table, cu_q, kv_len, num_tokens=rows * queries, scale=scale
        )
    }
    if queries == context:
        batched = q.view(rows, queries, shape.heads, shape.head_dim).transpose(1, 2)
        keys, values = pool.contiguous(0, rows, context)
        ways["sdpa"] = lambda: F.scaled_dot_product_attention(
            batched, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    flops = prefill_flops(shape, rows, queries, context)
    for name, call in ways.items():
        seconds, how = seconds_per_call([call], q.device)
        report.row(
            case=f"prefill {name}", heads=f"{shape.heads}/{shape.kv_heads}", rows=rows, queries=queries,
            context=context, us=1e6 * seconds, tflop_per_s=flops / seconds / 1e12,
            share=flops / seconds / peaks.flops, how=how,
        )  # fmt: skip
