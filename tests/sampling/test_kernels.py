"""The kernels of sampling, in C++ and in Triton, against the plainest implementation, token for token,
however the work is cut and shared out.

What any sampler must do, these must too: see ``test_sampler`` and ``test_distributions``. A row takes about a
tenth of a second in Triton's interpreter, so it gets few; compiled, the same checks get many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from aioinfer.sampling import native_sampler
from aioinfer.sampling.batch import PenaltyReset, SamplingBatch
from aioinfer.sampling.noise import uniform
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.sampler import Sampler
from tests.model.kernels import DEVICES, interpreted_on, interpreted_only, kernels_or_skip
from tests.sampling.support import (
    CPU,
    EDGES,
    LINE,
    MIXED,
    make_batch,
    native_thread_pool,
    penalise,
    random_logits,
    random_row,
    reference,
    telling_rows,
)
from tests.tiers import INTERPRETER, SECONDS, grid, nightly, rest

#: of the native kernels: a stretch of tokens is shared out as one; a list holds so many
STRETCH, LISTED = 1024, 8192
#: One chunk and several, the last of them partly empty; groups of a token and of many; lists that most rows
#: overflow, so that they are searched whole, and lists of several tiles.
TUNINGS = {
    "as it runs": (),
    "small lists": (("chunk", 32), ("groups", 64), ("listed", 4), ("list_tile", 4), ("wide_tile", 32)),
    "long lists": (("chunk", 64), ("groups", 16), ("listed", 256), ("list_tile", 32), ("wide_tile", 16)),
}
#: who searches rows whose lists are too short: one program; or several, those without top-k or all of them
WIDE: dict[str, dict[str, Any]] = {
    "one program": {},
    "nuclei": {"wide_nucleus": True},
    "all": {"wide_top_k": True},
}


@dataclass(frozen=True)
class Kernels:
    """Kernels of one kind, on a device."""

    device: str
    #: one token per row of logits; by teams of several sizes, where there are teams
    samplers: Sequence[Callable[[torch.Tensor, SamplingBatch], torch.Tensor]]
    #: lengths of rows that are cut in all ways
    lengths: Sequence[int]
    triton: bool = False

    def share(self, native: int, interpreted: int, compiled: int) -> int:
        """How much they get."""
        if not self.triton:
            return native
        return interpreted if interpreted_on(self.device) else compiled

    def sample(self, logits: torch.Tensor, rows: Sequence[dict[str, Any]]) -> list[int]:
        at = torch.device(self.device)
        tokens = self.samplers[-1](logits.to(at), make_batch([*rows], at))
        assert (tokens.dtype, tokens.device.type) == (torch.int64, self.device)
        found: list[int] = tokens.tolist()
        return found


def by_triton(*variants: tuple[str, str]) -> list[Any]:
    """Triton's kernels with these tunings and searches, interpreted and compiled."""
    pairs = [(device, (str(device.values[0]), *each)) for device in DEVICES for each in variants]
    return [pytest.param(each, id=" ".join(each), marks=device.marks) for device, each in pairs]


def by_torch(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return Sampler(64, logits.shape[1], CPU, "torch").sample(logits, batch)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those that are named by the parameter; torch's operations, too."""
    if request.param == "torch":
        yield Kernels("cpu", [by_torch], [2, 150, 5000])
        return
    if request.param == "native":
        native_thread_pool()
        teams = [shared_thread_pool(threads) for threads in (1, 3, 2)]
        lengths = [1, 2, 7, 8, 9, 16, 31, 150, STRETCH, STRETCH + 1, 2 * STRETCH + 17]
        yield Kernels("cpu", [partial(native_sampler.sample_tokens, team) for team in teams], lengths)
        return
    device, tuning, wide = request.param
    kernels_or_skip(device)
    from aioinfer.sampling.triton_lines import SampleTuning
    from aioinfer.sampling.triton_sampler import sample_tokens

    use_dirty_memory(monkeypatch)
    chosen = SampleTuning(**dict(TUNINGS[tuning]))

    def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sample_tokens(logits, replace(batch, **WIDE[wide]), chosen)

    with np.errstate(all="ignore"):
        yield Kernels(device, [sample], [1, 150], triton=True)


def use_dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's launches hand on lies in memory that holds something: very likely tokens with odd ids."""
    from aioinfer.sampling.triton_lines import Scratch

    make = Scratch.make

    def used(*arguments: Any) -> Scratch:
        scratch = make(*arguments)
        for field in fields(scratch):
            tensor = getattr(scratch, field.name)
            tensor.fill_(1e9 if tensor.is_floating_point() else -77)
        return scratch

    monkeypatch.setattr(Scratch, "make", used)


SMALL = ("small lists", "one program")
KERNELS = grid(
    ["native"],
    by_triton(SMALL, ("small lists", "nuclei"), ("small lists", "all"), ("long lists", "one program")),
    INTERPRETER,
)


def random_rows(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(rows)]))


@pytest.mark.parametrize(
    "kernels", [*KERNELS, *grid([], by_triton(("as it runs", "one program")), INTERPRETER)], indirect=True
)
def test_every_row_equals_the_plain_implementation(kernels: Kernels) -> None:
    """Greedy and filtered rows, ties, infinities, broken rows, temperatures from nothing to 100; many rows,
    and few, which are shared out by stretches."""
    for vocab in kernels.lengths:
        for seed in range(kernels.share(12, 1, 100)):
            rng = np.random.default_rng([seed, vocab])
            logits, rows = random_rows(rng, 9, vocab), [random_row(rng) for _ in range(9)]
            before = logits.clone()
            wanted = [reference(line.numpy(), row) for line, row in zip(logits, rows, strict=True)]
            for count in (9, 3):
                found = kernels.sample(logits[:count], rows[:count])
                assert found == wanted[:count], (vocab, seed, rows)
            assert torch.equal(before.nan_to_num(), logits.nan_to_num()), "the logits were written to"


@rest(SECONDS)
@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
def test_filters_keep_neither_more_nor_less(kernels: Kernels) -> None:
    """At seeds at which filters that are a little off would draw something else."""
    rows = telling_rows()
    wanted = [reference(LINE, row) for row in rows]
    assert kernels.sample(torch.from_numpy(LINE).expand(len(rows), -1), rows) == wanted


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(
    "kernels", grid(["torch", "native"], by_triton(SMALL, ("small lists", "all")), INTERPRETER), indirect=True
)
def test_edges(kernels: Kernels, name: str) -> None:
    line = np.array(EDGES[name], np.float32)
    wanted = [reference(line, row) for row in MIXED]
    assert kernels.sample(torch.from_numpy(line).expand(4, -1), MIXED) == wanted


@pytest.mark.parametrize("kernels", ["native", *by_triton(SMALL)], indirect=True)
def test_no_rows_give_no_tokens(kernels: Kernels) -> None:
    floats = torch.zeros(0, device=kernels.device)
    ints = floats.long()
    empty = SamplingBatch(*(ints,) * 3, *(floats,) * 3, ints, *(floats,) * 3, False, True, True, True, False)
    for sample in kernels.samplers:
        assert sample(torch.zeros(0, 30, device=kernels.device), empty).shape == (0,)


@pytest.mark.parametrize(
    "kernels", grid(["torch", "native"], by_triton(("long lists", "one program")), INTERPRETER), indirect=True
)
def test_a_row_depends_on_itself_alone(kernels: Kernels) -> None:
    """Not on its company, the threads or the flags of the batch, nor on how logits and parameters lie in
    memory."""
    at, vocab = torch.device(kernels.device), kernels.share(3000, 90, 90)
    rng = np.random.default_rng(3)
    rows = [random_row(rng) for _ in range(kernels.share(20, 4, 50))]
    logits = random_rows(rng, len(rows), vocab).to(at)
    together = kernels.sample(logits, rows)
    # As a graph has it: every flag set.
    flags: dict[str, Any] = {"any_top_k": True, "any_top_p": True, "any_min_p": True, "all_greedy": False}
    counts = [len(rows)] if kernels.triton else [len(rows), 1, 2, 7]
    for sample in kernels.samplers:
        for count in counts:
            order = rng.permutation(len(rows))[:count].tolist()
            batch = make_batch([rows[index] for index in order], at)
            wide = torch.full((count, vocab + 100), math.nan, device=at)
            wide[:, :vocab] = logits[order]
            for name in ("temperature", "top_p", "min_p", "top_k", "seeds", "positions"):
                flags[name] = getattr(batch, name).repeat_interleave(2)[::2]
            for lying in (wide[:, :vocab], logits[order].T.contiguous().T):
                found = sample(lying, replace(batch, **flags)).tolist()
                assert found == [together[index] for index in order], count


# -- those in C++ ------------------------------------------------------------------------------------------


@pytest.fixture
def team() -> ThreadPool:
    return native_thread_pool()


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
    assert native_sampler.sample_tokens(team, line.expand(len(rows), -1), make_batch(rows)).tolist() == wanted


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
        assert int(native_sampler.sample_tokens(team, logits, make_batch([{"seed": seed}]))) == earlier, seed
        found += 1
    assert found > 5


def test_bans_are_gone_from_the_logits_afterwards(team: ThreadPool) -> None:
    """Pairs that come twice, NaN and infinity too; rows that share memory are banned from one by one."""
    logits = torch.zeros(4, 30)
    logits[:, 7], logits[1, 3], logits[2, 4] = 5.0, torch.nan, torch.inf
    before = logits.clone()
    rows: list[dict[str, Any]] = [{"temperature": 0.0, "banned": [7, 7, 0]} for _ in range(4)]
    rows[1]["banned"], rows[2]["banned"] = [3], [4]
    sample = partial(native_sampler.sample_tokens, team)
    assert sample(logits, make_batch(rows)).tolist() == [1, BAD_LOGITS, BAD_LOGITS, 1]
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    rows = [{"temperature": 0.0, "banned": [7]}, {"temperature": 0.0}]
    assert sample(logits[:1].expand(2, -1), make_batch(rows)).tolist() == [0, 7]


def test_a_sampler_warms_up() -> None:
    native_thread_pool()
    Sampler(2, 70, CPU, "native").warm_up()


# -- those in Triton ---------------------------------------------------------------------------------------


def compiled(device: str) -> bool:
    """Kernels get many rows."""
    return not interpreted_on(device)


@nightly(INTERPRETER)
@pytest.mark.parametrize("vocab", [50_257, 262_144])
def test_large_vocabularies_equal_the_torch_path_on_the_same_device(device: str, vocab: int) -> None:
    """Peaked rows, whose candidates fit a list, and flat ones."""
    at, number = torch.device(device), 33 if compiled(device) else 2
    for seed in range(6 if compiled(device) else 1):
        rng = np.random.default_rng([seed, vocab])
        logits = torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(number)])).to(at)
        batch = make_batch([{**random_row(rng), "temperature": 1.0} for _ in range(number)], at)
        wanted = Sampler(40, vocab, at, "torch").sample(logits, batch)
        assert torch.equal(Sampler(40, vocab, at, "triton").sample(logits, batch), wanted), seed


GUESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing is above": lambda peak: peak * 0 + 1.0,
    "only the likeliest": lambda peak: peak * 0,
    "everything": lambda peak: peak * 0 - math.inf,
    "no number": lambda peak: peak * 0 + math.nan,
}


@nightly(INTERPRETER)
@interpreted_only
@pytest.mark.parametrize(
    "guess", grid(["only the likeliest"], [guess for guess in GUESSES if guess != "only the likeliest"])
)
def test_a_wrong_bound_costs_time_and_no_token(
    device: str, guess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finish looks whether the list holds what the filters ask for, and searches the row if not."""
    from aioinfer.sampling import triton_scan
    from aioinfer.sampling.triton_lines import SampleTuning
    from aioinfer.sampling.triton_sampler import sample_tokens

    use_dirty_memory(monkeypatch)
    monkeypatch.setattr(triton_scan, "_guess", lambda *arguments: GUESSES[guess](arguments[2]))
    rows = [{"top_k": 5, "seed": 3}, {"top_p": 0.7, "seed": 4}, {"top_k": 9, "top_p": 0.5, "seed": 5}]
    wanted = [reference(LINE, row) for row in rows]
    logits = torch.from_numpy(np.stack([LINE] * 3))
    for listed in (16, 128):
        for wide in WIDE:
            batch, tuning = make_batch(rows, **WIDE[wide]), SampleTuning(chunk=64, listed=listed)
            assert sample_tokens(logits, batch, tuning).tolist() == wanted, wide


@nightly(INTERPRETER)
def test_the_sampler_on_kernels_is_the_sampler(device: str) -> None:
    """Penalties that count on the device, bans and broken rows, step after step."""
    at, vocab = torch.device(device), 60
    rng = np.random.default_rng(7)
    rows = [
        {"slot": 3, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
        {"slot": 1, "temperature": 0.0, "presence_penalty": 1.5, "banned": [3, 7, 3]},
        {"slot": 2, "top_k": 4, "banned": [59]},
    ]
    said: dict[int, list[int]] = {3: [4, 4], 1: [], 2: []}
    sampler = Sampler(4, vocab, at, "triton")
    assert sampler.backend.name == "triton"
    for position in range(100 if compiled(device) else 6):
        lines = [rng.normal(0, 1.5, vocab).astype(np.float32) for _ in rows]
        lines[2][5] = math.nan if position == 2 else 0.0
        rows = [{**row, "position": position} for row in rows]
        wanted = [
            reference(penalise(line, [1, 2], said[row["slot"]], row), row)
            for line, row in zip(lines, rows, strict=True)
        ]
        resets = [PenaltyReset(slot, [1, 2], said[slot]) for slot in (3, 1)] if position == 0 else []
        batch = make_batch(rows, at, penalty_resets=resets)
        logits = torch.from_numpy(np.stack(lines)).to(at)
        assert sampler.sample(logits, batch).tolist() == wanted, position
        assert torch.equal(logits.cpu().nan_to_num(), torch.from_numpy(np.stack(lines)).nan_to_num())
        for row, token in zip(rows, wanted, strict=True):
            said[row["slot"]].append(token)
    assert BAD_LOGITS in said[2]


@pytest.mark.gpu
@pytest.mark.parametrize("wide", WIDE)
def test_a_graph_samples_for_rows_that_come_later(wide: str) -> None:
    """Captured with some parameters and replayed with others, greedy and neutral ones among them."""
    kernels_or_skip("cuda")
    at, vocab, count = torch.device("cuda"), 151_936, 8
    sampler = Sampler(count, vocab, at)
    assert sampler.backend.name == "triton"
    rng = np.random.default_rng(0)
    flags: dict[str, Any] = {"any_top_k": True, "any_top_p": True, "any_min_p": True, "all_greedy": False}
    fixed = replace(make_batch([{}] * count, at), **flags, **WIDE[wide])
    logits = torch.zeros(count, vocab, device=at)
    sampler.sample(logits, fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample(logits, fixed)
    for _ in range(20 if compiled("cuda") else 2):
        batch = make_batch([random_row(rng) for _ in range(count)], at)
        logits.copy_(torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(count)])))
        for name in ("positions", "seeds", "temperature", "top_p", "min_p", "top_k"):
            getattr(fixed, name).copy_(getattr(batch, name))
        graph.replay()
        assert torch.equal(tokens, Sampler(count, vocab, at, "torch").sample(logits, batch))
