"""Random problems for attention kernels, and attention as the formula says.

The same checks run in Triton's interpreter on the CPU and, marked ``gpu``, compiled on CUDA. Which of the
two a process does is settled when triton is imported; tests/conftest.py chooses by the machine.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from aioinfer.model.attention.base import Attention, AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary

_ROOT = Path(__file__).parents[2]
#: bytes of a thread's stack that a kernel may use: a dozen registers, by target and release of Triton
SPILLED = 64
#: the devices a check of a kernel runs on, one of them in a given process
DEVICES = [pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)]
#: what a test that runs kernels on CUDA calls where they are interpreted there, on the emulated device
emulated: Callable[[], None] | None = None
#: for checks that change a kernel's functions, which a compiled one would not notice
interpreted_only = pytest.mark.parametrize("device", DEVICES[:1], indirect=True)
#: Largest error against float64. Inputs are about 1 in size and so are outputs; the half types round the
#: weights and the result to 8 or 11 bits, float32 rounds sums only.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def kernels_or_skip(device: str, *, compiled: bool = False) -> ModuleType:
    """``triton_common``, if this process can run kernels on ``device``. ``compiled``: the test has a twin
    that runs interpreted ones on the CPU, in a size that they can do at a few rows a second.

    A process either interprets kernels or compiles them, so a machine runs one half of the checks: without
    a GPU the suite interprets, with one it compiles, and ``TRITON_INTERPRET=1`` makes up for the other half.
    Triton 3.6, whose interpreter breaks on numpy 2.4, is what torch 2.11 brings for CUDA: there only the
    compiled kernels count. The development extra installs a newer one elsewhere.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    from aioinfer.model.attention import triton_common

    if device == "cuda":
        if triton_common.INTERPRETED:
            if emulated is None:
                pytest.skip("this process interprets kernels; without TRITON_INTERPRET it compiles them")
            if compiled:
                pytest.skip("of compiled kernels; a twin of this test runs interpreted ones on the CPU")
            emulated()
        return triton_common
    if not triton_common.INTERPRETED:
        pytest.skip("this process compiles kernels; TRITON_INTERPRET=1 runs them on the CPU")
    if not _interpreter_works():
        pytest.skip("this triton's interpreter does not know this numpy (triton 3.6 and numpy 2.4)")
    remember_builtins()
    return triton_common


def interpreted_on(device: str) -> bool:
    """Whether this process interprets kernels on ``device``; then checks get little to do."""
    return device == "cpu" or emulated is not None


def compiled(module: str, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a module says of the kernels that it compiles, in a process of its own: whether Triton compiles or
    interprets is settled on import."""
    pytest.importorskip("triton", reason="triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=env, text=True, capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _interpreter_works() -> bool:
    """Triton 3.6 asks numpy for the int of a one-element array, which numpy 2.4 refuses."""
    import numpy as np
    import triton

    def release(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    return release(triton.__version__) >= (3, 7) or release(np.__version__) < (2, 4)


@functools.cache
def remember_builtins() -> None:
    """Save the interpreter a quarter of its time: for every kernel and every function that a kernel calls, it
    looks at all members of ``triton.language`` for those to replace while the kernel runs."""
    from triton.runtime import interpreter

    @functools.cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        members = inspect.getmembers(package)
        return [(name, member) for name, member in members if interpreter.tl.core.is_builtin(member)]

    def replace(package: Any, *arguments: Any) -> None:
        for name, member in builtins(package):
            if getattr(package, name) is member:  # or a kernel that runs has replaced it
                interpreter._patch_attr(package, name, member, *arguments)

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = replace


def matmul_by_rows(a: Any, b: Any, dtype: object = None) -> Any:
    """What BLAS does not promise and the matrix unit does: a row's sums, wherever in the matrix it is."""
    return (a[:, :, None] * b[None]).sum(1, dtype=dtype)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Their squares have the same sum in any order, hence a norm has the same bits."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(slots=True)
class Problem:
    """Rows over a shuffled pool in which every cell that belongs to no row holds NaN."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    cu_q: torch.Tensor
    kv_len: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]

    @classmethod
    def make(
        cls,
        rows: Sequence[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        extra_pages: int = 1,
        window: int | None = None,
        seed: int = 0,
    ) -> Problem:
        """Rows of (q_len, kv_len). The page table is ``extra_pages`` wider than the longest row. What a
        ``window`` keeps from all of a row's queries holds NaN as well.
        """
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-kv // page_size) for _, kv in rows]
        free = list(range(1, sum(counts) + 3))
        random.Random(seed).shuffle(free)
        table = torch.zeros(len(rows), max(counts, default=0) + extra_pages, dtype=torch.int64)
        shape = (sum(counts) + 3, page_size, kv_heads, head_dim)
        keys, values = (torch.full(shape, float("nan")) for _ in range(2))
        for row, (count, (q_len, kv)) in enumerate(zip(counts, rows, strict=True)):
            pages = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
            table[row, :count] = pages
            for position in range(0 if window is None else max(0, kv - q_len + 1 - window), kv):
                at = pages[position // page_size], position % page_size
                keys[at] = torch.randn(kv_heads, head_dim, generator=generator)
                values[at] = torch.randn(kv_heads, head_dim, generator=generator)
        q_lens, kv_lens = [q for q, _ in rows], [kv for _, kv in rows]
        q = torch.randn(sum(q_lens), heads, head_dim, generator=generator)
        ends = torch.tensor([0, *q_lens]).cumsum(0)
        kv_len = torch.tensor(kv_lens, dtype=torch.int64)
        q, keys, values = (tensor.to(dtype).to(device) for tensor in (q, keys, values))
        table, ends, kv_len = (tensor.to(device) for tensor in (table, ends, kv_len))
        return cls(q, keys, values, table, ends, kv_len, q_lens, kv_lens)

    def part(self, row: int, start: int = 0, stop: int | None = None, width: int | None = None) -> Problem:
        """Tokens [start, stop) of a row as a chunk that ends there, alone in its batch. ``width``: of its
        page table."""
        stop = self.q_lens[row] if stop is None else stop
        begin, count = int(self.cu_q[row]), stop - start
        kv = self.kv_lens[row] - self.q_lens[row] + stop
        ends, lens = (torch.tensor(values, device=self.q.device) for values in ([0, count], [kv]))
        table = self.block_table[row : row + 1, :width]
        q = self.q[begin + start : begin + stop]
        return Problem(q, self.keys, self.values, table, ends, lens, [count], [kv])

    def some(self, rows: Sequence[int]) -> Problem:
        """Some of the rows, in another order."""
        each = [self.part(row) for row in rows]
        ends = torch.tensor([0, *(part.q_lens[0] for part in each)], device=self.q.device).cumsum(0)
        q, table, kv_len = (
            torch.cat([getattr(part, name) for part in each]) for name in ("q", "block_table", "kv_len")
        )
        lens = [[lens[row] for row in rows] for lens in (self.q_lens, self.kv_lens)]
        return Problem(q, self.keys, self.values, table, ends, kv_len, *lens)

    def expected(
        self,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        block: int = 1,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, heads, head_dim] in float64 on the CPU."""
        q, keys, values = (tensor.double().cpu() for tensor in (self.q, self.keys, self.values))
        page_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
        result = torch.zeros_like(q)
        token = 0
        for pages, q_len, kv_len in zip(self.block_table.cpu(), self.q_lens, self.kv_lens, strict=True):
            cells = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            for position in range(kv_len - q_len, kv_len):
                if kv_len:
                    first = 0 if window is None else max(0, position + 1 - window)
                    seen = cells[first : min(kv_len, (position // block + 1) * block)]
                    k, v = (
                        store.flatten(0, 1)[seen].repeat_interleave(group, dim=1) for store in (keys, values)
                    )
                    scores = torch.einsum("hd,nhd->hn", q[token], k) * scale
                    if soft_cap is not None:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    if sinks is not None:
                        scores = torch.cat((scores, sinks.double().cpu()[:, None]), 1)
                    result[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(v)], v)
                token += 1
        return result


class Setup:
    """A step over a pool in which the step's own keys and values are still missing."""

    def __init__(self, task: Problem, num_decodes: int) -> None:
        page_size = task.keys.shape[1]
        cells = []
        for pages, q_len, kv_len in zip(task.block_table.tolist(), task.q_lens, task.kv_lens, strict=True):
            cells += [
                pages[at // page_size] * page_size + at % page_size for at in range(kv_len - q_len, kv_len)
            ]
        self.task = task
        self.slots = torch.tensor(cells, device=task.q.device)
        self.k, self.v = (store.flatten(0, 1)[self.slots] for store in (task.keys, task.values))
        self.num_decodes = num_decodes

    def pool(self) -> KVPool:
        task = self.task
        pages, page_size, kv_heads, head_dim = task.keys.shape
        pool = KVPool(
            [KVShape(kv_heads, head_dim)] * 2,
            num_pages=pages - 1, page_size=page_size, dtype=task.keys.dtype, device=task.keys.device,
        )  # fmt: skip
        for stores, given in ((pool.keys, task.keys), (pool.values, task.values)):
            # The other layer's memory is none of this layer's business.
            stores[0].fill_(math.nan)
            stores[1].copy_(given)
            stores[1].flatten(0, 1)[self.slots] = math.nan
        return pool

    def batch(self) -> Batch:
        task = self.task
        ids = torch.zeros(len(task.q), dtype=torch.int64, device=task.q.device)
        return Batch(
            ids, ids, self.slots, task.cu_q, task.kv_len, task.block_table, ids[:0],
            q_lens=task.q_lens, kv_lens=task.kv_lens, num_decodes=self.num_decodes,
        )  # fmt: skip

    @property
    def sinks(self) -> torch.Tensor | None:
        """In two of three setups none."""
        heads = self.task.q.shape[1]
        return torch.linspace(-3, 3, heads, device=self.task.q.device) if heads % 3 == 0 else None

    def run(self, attention: Attention, params: AttentionParams) -> torch.Tensor:
        task = self.task
        return attention(1, task.q, self.k, self.v, self.batch(), params, self.sinks)

    def run_fused(self, attention: Attention, norm: HeadNorm | None, params: AttentionParams) -> torch.Tensor:
        """The same heads as a projection, at positions of their own."""
        qkv = torch.cat((self.task.q, self.k, self.v), dim=1)
        generator = torch.Generator().manual_seed(0)
        angles = torch.randn(len(qkv), 1, qkv.shape[2], generator=generator)
        rotary = None
        if qkv.shape[1] % 5:
            rotary = Rotary(*(f(angles).to(qkv) for f in (torch.cos, torch.sin)))
        return attention.fused(1, qkv, norm, rotary, self.batch(), params, self.sinks)


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), expected, rtol=bound, atol=bound)
