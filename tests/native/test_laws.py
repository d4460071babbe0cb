"""Every result is a function of its own row, to the bit: it depends neither on the batch, nor on the chunks
of its prompt, nor on the place of its pages, nor on the number of threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.quantization import Quantization
from aioinfer.native.bindings import shared_thread_pool
from tests.model.block_models import block_config, write_checkpoint
from tests.model.checkpoints import RECURRENT, VOCAB, make_model
from tests.model.further_families import FURTHER
from tests.model.harness import attention_for, build_batch, fill, row_states, state_pool
from tests.native.support import DTYPES, Bench, Heads, Row, draw_rows, normal
from tests.tiers import SECONDS, grid, rest, thinned

CPU = torch.device("cpu")
KINDS = ["llama-biases", "mistral-window", "qwen2-window", "qwen3-moe-mixed", "qwen3-wide-untied", "sdar"]
KINDS += ["deepseek-v3", "minicpm3", *RECURRENT]


def chunked(bench: Bench, row: Row, rng: random.Random) -> torch.Tensor:
    """The row's own step, cut into chunks of whole blocks."""
    block = bench.heads.scoring.block
    bench.deal([row])
    bench.past([row])
    at, parts = row.start, []
    while at < len(row.qkv):
        stop = min(at + block * rng.choice([1, 1, 2, 3, 13, 14, 15, 40]), len(row.qkv))
        parts += bench.step([(row, at, stop)])
        at = stop
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", grid(range(4), range(4, 16)))
def test_attention_gives_a_row_the_same_bits_everywhere(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    heads = Heads.draw(rng, dtype)
    rows = draw_rows(rng, heads, 4, longest=200)
    together = Bench(heads, 16, threads=1).run(rows)
    order = list(range(len(rows)))
    rng.shuffle(order)
    for page_size, threads in ((1, 2), (48, 3)):
        shuffled = Bench(heads, page_size, threads=threads, seed=seed).run([rows[at] for at in order])
        for at, got in zip(order, shuffled, strict=True):
            assert torch.equal(got, together[at]), (page_size, threads, at)
    for page_size in (3, 32):
        for row, wanted in zip(rows, together, strict=True):
            assert torch.equal(*[chunked(Bench(heads, page_size), row, rng), wanted]), page_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", grid([129], [100, 127, 300]))
def test_windows_over_the_ends_of_stretches_have_the_same_bits_by_any_chunks(
    window: int, dtype: torch.dtype
) -> None:
    """Queries of one task begin at different tiles; sums are divided by position in spite of that."""
    heads = Heads(2, 2, 16, dtype, AttentionParams(1.5, window=window))
    row = Row(normal(500, 6, 16, seed=window, dtype=dtype), 0)
    (whole,) = Bench(heads, 16).run([row])
    for chunk in (1, 5, 9):
        bench = Bench(heads, 16)
        bench.deal([row])
        parts = [bench.step([(row, at, min(at + chunk, 500))])[0] for at in range(0, 500, chunk)]
        assert torch.equal(torch.cat(parts), whole), chunk


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", grid([True], [False]))
def test_linear_layers_give_a_row_the_same_bits_everywhere(gated: bool, dtype: torch.dtype) -> None:
    weight, bias = normal(160, 208, seed=0, dtype=dtype), normal(160, seed=1, dtype=dtype)
    values = normal(90, 208, seed=2, dtype=dtype)
    alone = NativeLinear(shared_thread_pool(1), weight, bias, gated=gated)
    wanted = torch.cat([alone(row[None]) for row in values])
    for threads in (1, 2, 3):
        linear = NativeLinear(shared_thread_pool(threads), weight, bias, gated=gated)
        for rows in range(1, 91):
            order = torch.randperm(90, generator=torch.Generator().manual_seed(rows))[:rows]
            assert torch.equal(linear(values[order]), wanted[order]), (rows, threads)


class Runs:
    """Sequences through a decoder, in any order and by any chunks."""

    def __init__(self, model: Any, page_size: int, seed: int) -> None:
        self.model, self.page_size = model, page_size
        pages = 2100 // page_size + 40
        self.attention = attention_for(model.spec, pages, page_size, "native")
        fill(self.attention, float("nan"))
        self._free = list(range(1, pages + 1))
        self._random = random.Random(seed)
        self._random.shuffle(self._free)
        self.states = state_pool(model.spec, 400)
        self._cells = self._random.sample(range(1, 401), 400)
        #: the cell of each sequence, by the identity of its pages
        self._cell: dict[int, int] = {}

    def pages(self, length: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-length // self.page_size))]

    def step(self, rows: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        wanted = range(sum(len(ids) for ids, _, _ in rows))
        states = row_states(self.states, [self._next(start, pages) for _, start, pages in rows])
        batch = build_batch(rows, self.page_size, num_decodes=0, logits_rows=wanted, states=states)
        logits: torch.Tensor = self.model.forward(batch, self.attention)
        return logits

    def _next(self, start: int, pages: list[int]) -> tuple[int, int]:
        """The cells to read and to write: the same, or others."""
        read = self._cell[id(pages)] if start else 0
        write = read if read and self._random.random() < 0.5 else self._cells.pop()
        self._cell[id(pages)] = write
        return read, write


def models(
    path: Path, kind: str, dtype: str, quantization: Quantization, get: Callable[[str], Any]
) -> dict[int, Any]:
    """The same model for pools of 1, 2 and 3 threads."""
    made, before = {}, torch.get_num_threads()
    if kind == "sdar":
        write_checkpoint(path, block_config("sdar", intermediate_size=48))
    else:
        path = get(kind)[0]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        size = 4 if kind == "sdar" else None
        made[threads] = load_model(
            path,
            LoadOptions(
                dtype=dtype, device=CPU, kernels="native", block_size=size, quantization=quantization
            ),
        )
        assert isinstance(made[threads], NativeDecoder)
    torch.set_num_threads(before)
    return made


@rest(SECONDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_of_a_context_of_latents_give_the_same_bits_as_tasks_of_their_own(
    tmp_path: Path, dtype: str
) -> None:
    """A long context is divided into parts, which a decode alone computes side by side, and a prompt, or many
    rows, one after the other."""
    changes = FURTHER["deepseek-v2"][1] | {"num_hidden_layers": 1, "max_position_embeddings": 2100}
    make_model("DeepseekV2", changes, tmp_path, seed=5)
    rng, found, before = random.Random(7), [], torch.get_num_threads()
    ids = [rng.randrange(VOCAB) for _ in range(2080)]
    for threads, cuts in ((1, []), (3, [1023, 1024, 1025, 1026, 2040, 2047, 2048, 2049, 2050]), (2, [1000])):
        torch.set_num_threads(threads)
        options = LoadOptions(dtype=dtype, device=CPU, kernels="native")
        runs = Runs(load_model(tmp_path, options), 32, threads)
        pages, parts = runs.pages(len(ids)), []
        others = [(ids[:3], 0, runs.pages(3)) for _ in range(20 if threads == 2 else 0)]
        for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            parts.append(runs.step([(ids[start:stop], start, pages), *others])[: stop - start])
        found.append(torch.cat(parts))
    torch.set_num_threads(before)
    assert found[0].isfinite().all()
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@rest(SECONDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", thinned(KINDS, 3))
def test_a_decoder_gives_a_row_the_same_bits_everywhere(
    tmp_path: Path, checkpoint: Callable[[str], Any], kind: str, quantization: Quantization, dtype: str
) -> None:
    rng, block = random.Random(3), 4 if kind == "sdar" else 1
    by_threads = models(tmp_path, kind, dtype, quantization, checkpoint)
    longest = 70 if kind in RECURRENT else 33
    prompts = [[rng.randrange(100) for _ in range(block * length)] for length in (1, 9, 17, longest)]
    first = Runs(by_threads[1], 16, 0)
    wanted = [first.step([(ids, 0, first.pages(len(ids)))]) for ids in prompts]
    assert all(logits.isfinite().all() for logits in wanted)
    for threads, page_size in ((1, 5), (2, 32), (3, 16)):
        runs = Runs(by_threads[threads], page_size, threads)
        held = [runs.pages(len(ids)) for ids in prompts]
        done, parts = [0] * len(prompts), [[] for _ in prompts]  # type: ignore[var-annotated]
        while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
            rows, indices = [], []
            for at in rng.sample(range(len(prompts)), len(prompts)):
                take = block * rng.choice([0, 1, 2, 7, 15])
                ids = prompts[at][done[at] : done[at] + take]
                if ids:
                    rows.append((ids, done[at], held[at]))
                    indices.append(at)
                    done[at] += len(ids)
            if not rows:
                continue
            logits = runs.step(rows).split([len(ids) for ids, _, _ in rows])
            for at, part in zip(indices, logits, strict=True):
                parts[at].append(part)
        for at, logits in enumerate(wanted):
            assert torch.equal(torch.cat(parts[at]), logits), (threads, page_size, at)
