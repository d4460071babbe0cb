"""Sampling by the kernels in C++ against the plainest implementation, however the work is shared out.

What any sampler must do, these must too: see ``test_sampler.py`` and ``test_distributions.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.logprobs import TorchLogprobs
from aioinfer.sampling.native_sampler import NativeLogprobs, sample_tokens
from aioinfer.sampling.noise import uniform
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.sampler import Sampler
from tests.sampling.support import (
    CPU,
    EDGES,
    LINE,
    MIXED,
    make_batch,
    native_thread_pool,
    random_logits,
    random_row,
    reference,
    telling_rows,
)
from tests.tiers import SECONDS, rest

#: a stretch of tokens is shared out as one; a list holds so many
STRETCH, LISTED = 1024, 8192


@pytest.fixture
def team() -> ThreadPool:
    return native_thread_pool()


def random_rows(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(rows)]))


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 16, 31, 150, STRETCH, STRETCH + 1, 2 * STRETCH + 17])
def test_every_row_equals_the_plain_implementation(team: ThreadPool, vocab: int) -> None:
    """Row by row, of which there are many here, and by stretches; vectors that end with the row or do not."""
    for seed in range(12):
        rng = np.random.default_rng([seed, vocab])
        logits, rows = random_rows(rng, 9, vocab), [random_row(rng) for _ in range(9)]
        before = logits.clone()
        wanted = [reference(line.numpy(), row) for line, row in zip(logits, rows, strict=True)]
        for count in (9, 3):
            assert sample_tokens(team, logits[:count], make_batch(rows[:count])).tolist() == wanted[:count], (
                seed
            )
        assert torch.equal(before.nan_to_num(), logits.nan_to_num()), "the logits were written to"


@pytest.mark.parametrize("name", EDGES)
def test_edges(team: ThreadPool, name: str) -> None:
    line = np.array(EDGES[name], np.float32)
    wanted = [reference(line, row) for row in MIXED]
    logits = torch.from_numpy(line).expand(4, -1)
    assert sample_tokens(team, logits, make_batch(MIXED)).tolist() == wanted


@rest(SECONDS)
def test_filters_keep_neither_more_nor_less(team: ThreadPool) -> None:
    """At seeds at which filters that are a little off would draw something else."""
    rows = telling_rows()
    wanted = [reference(LINE, row) for row in rows]
    assert (
        sample_tokens(team, torch.from_numpy(LINE).expand(len(rows), -1), make_batch(rows)).tolist() == wanted
    )


def shaped(name: str, vocab: int) -> torch.Tensor:
    """A row by what becomes of its list of candidates."""
    generator = torch.Generator().manual_seed(len(name))
    line = torch.randn(vocab, generator=generator)
    if name == "peaked":
        line[torch.randperm(vocab, generator=generator)[:40]] += 12
    elif name == "neighbours":
        # More than a list holds, in few groups.
        line[5 * STRETCH : 14 * STRETCH] += 12
    elif name == "ties":
        line = (line * 2).round()
    elif name == "scaled to ties":
        line *= 1e-5
        line[7] = 1000
    elif name == "alike":
        line[:] = 3
    elif name == "few":
        line[40:] = -torch.inf
    return line


SHAPES = ["peaked", "neighbours", "flat", "ties", "scaled to ties", "alike", "few"]
LONG = 3 * LISTED + 100
FILTERED: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": LONG // STRETCH * 8, "temperature": 100.0},
    {"top_k": LISTED},
    {"top_k": LONG - 1, "temperature": 100.0},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999999, "temperature": 3.0},
    {"top_p": 1e-9, "temperature": 1e30},
    {"top_k": 60, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 50, "top_p": 0.05, "temperature": 1000.0},
    {"min_p": 0.2, "temperature": 1e-3},
]


@rest(SECONDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_of_candidates_that_suffice_and_that_do_not(team: ThreadPool, shape: str) -> None:
    line = shaped(shape, LONG)
    rows = [{**row, "seed": seed} for row in FILTERED for seed in range(6)]
    wanted = [reference(line.numpy(), row) for row in rows]
    assert sample_tokens(team, line.expand(len(rows), -1), make_batch(rows)).tolist() == wanted


def test_a_row_depends_on_itself_alone() -> None:
    """Not on the batch or the threads, nor on how logits and parameters lie in memory."""
    native_thread_pool()
    rng = np.random.default_rng(3)
    rows = [random_row(rng) for _ in range(20)]
    logits = random_rows(rng, 20, 3000)
    together = sample_tokens(shared_thread_pool(1), logits, make_batch(rows)).tolist()
    for threads in (1, 2, 3):
        team = shared_thread_pool(threads)
        for count in (1, 2, 7, 20):
            order = rng.permutation(20)[:count].tolist()
            batch = make_batch([rows[index] for index in order])
            wide = torch.full((count, 3100), torch.nan)
            wide[:, :3000] = logits[order]
            apart = {
                name: getattr(batch, name).repeat_interleave(2)[::2]
                for name in ("temperature", "top_p", "min_p", "top_k", "seeds", "positions")
            }
            for lying in (wide[:, :3000], logits[order].T.contiguous().T):
                got = sample_tokens(team, lying, replace(batch, **apart)).tolist()
                assert got == [together[index] for index in order], (threads, count)


@pytest.mark.parametrize(("earlier", "later"), [(3, 9), (3, 2000), (1500, 2000)])
def test_of_equal_sums_the_lower_id_wins(team: ThreadPool, earlier: int, later: int) -> None:
    """Even if the other token is the likeliest, in its stretch of the vocabulary or another one."""
    found = 0
    for seed in range(40):
        # Noise as the kernels have it, in double precision: torch's is not always rounded correctly.
        u = uniform(torch.tensor([seed]), torch.tensor([0]), torch.tensor([earlier, later]))[0]
        inner = -torch.log1p(-u.double()).float()
        lower, upper = -inner.double().log().float()
        gap = upper - lower
        if gap >= 0 or gap + lower != upper:
            continue
        logits = torch.full((1, 3000), -torch.inf)
        logits[0, earlier], logits[0, later] = gap, 0.0
        assert int(sample_tokens(team, logits, make_batch([{"seed": seed}]))) == earlier, seed
        found += 1
    assert found > 5


def test_bans_are_gone_from_the_logits_afterwards(team: ThreadPool) -> None:
    """Pairs that come twice, NaN and infinity too; rows that share memory are banned from one by one."""
    logits = torch.zeros(4, 30)
    logits[:, 7], logits[1, 3], logits[2, 4] = 5.0, torch.nan, torch.inf
    before = logits.clone()
    rows: list[dict[str, Any]] = [{"temperature": 0.0, "banned": [7, 7, 0]} for _ in range(4)]
    rows[1]["banned"], rows[2]["banned"] = [3], [4]
    assert sample_tokens(team, logits, make_batch(rows)).tolist() == [1, BAD_LOGITS, BAD_LOGITS, 1]
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    rows = [{"temperature": 0.0, "banned": [7]}, {"temperature": 0.0}]
    assert sample_tokens(team, logits[:1].expand(2, -1), make_batch(rows)).tolist() == [0, 7]


def test_no_rows_give_no_tokens(team: ThreadPool) -> None:
    ints, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    columns = *(ints,) * 3, *(floats,) * 3, ints, *(floats,) * 3
    empty = SamplingBatch(*columns, False, True, True, True, False)
    assert sample_tokens(team, torch.zeros(0, 30), empty).shape == (0,)


def test_a_sampler_warms_up() -> None:
    native_thread_pool()
    Sampler(2, 70, CPU, "native").warm_up()


# -- logprobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 33, STRETCH, 5000])
@pytest.mark.parametrize("top", [0, 1, 5, 300])
def test_logprobs_are_those_of_torch(team: ThreadPool, vocab: int, top: int) -> None:
    rng = np.random.default_rng([vocab, top])
    logits = torch.from_numpy(rng.normal(0, 4, (6, vocab)).astype(np.float32))
    logits[1] *= 20
    logits[2, : vocab // 2] = -torch.inf
    logits[3] = 2.5
    found, wanted = NativeLogprobs(team, logits, top), TorchLogprobs(logits, top)
    tokens = torch.from_numpy(rng.integers(-1, vocab, 6))
    assert found.top.shape == found.top_ids.shape == (6, min(top, vocab))
    torch.testing.assert_close(found.of(tokens), wanted.of(tokens), rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(found.top, wanted.top, rtol=1e-6, atol=3e-6)
    # Torch's are those of equals in no particular order; here the lower id is first.
    order = logits.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(found.top_ids, order[:, :top])
    assert torch.equal(
        found.top, torch.stack([found.of(ids) for ids in found.top_ids.T], 1) if top else found.top
    )


def test_logprobs_of_a_row_depend_on_itself_alone(team: ThreadPool) -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1)) * 3
    together, tokens = NativeLogprobs(team, logits, 4), torch.arange(9)
    for at in range(9):
        alone = NativeLogprobs(shared_thread_pool(1), logits[at : at + 1], 4)
        assert torch.equal(alone.of(tokens[at : at + 1]), together.of(tokens)[at : at + 1])
        assert torch.equal(alone.top[0], together.top[at])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logprobs_of_broken_rows_are_no_numbers(team: ThreadPool, value: float) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, 1500] = value
    if value < 0:
        logits[0] = value
    found = NativeLogprobs(team, logits, 3)
    assert found.of(torch.zeros(2, dtype=torch.int64)).isnan().tolist() == [True, False]
    assert found.top[0].isnan().any()
    assert found.top_ids[1].tolist() == [0, 1, 2]
