"""The sampling kernels against the plainest implementation, token for token, however the work is cut.

A row takes about a tenth of a second in the interpreter, so it gets few; compiled, the same checks get many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.sampling.batch import PenaltyReset, SamplingBatch
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.sampler import Sampler
from tests.model.kernels import interpreted_on, interpreted_only
from tests.sampling.support import (
    EDGES,
    LINE,
    MIXED,
    make_batch,
    penalise,
    random_logits,
    random_row,
    reference,
    telling_rows,
)

pytest.importorskip("triton", reason="triton is not installed")


from aioinfer.sampling import triton_scan
from aioinfer.sampling.triton_lines import SampleTuning, Scratch
from aioinfer.sampling.triton_sampler import sample_tokens
from tests.tiers import INTERPRETER, grid, nightly, points

#: One chunk and several, the last of them partly empty; groups of a token and of many; lists that most rows
#: overflow, so that they are searched whole, and lists of several tiles.
TUNINGS = {
    "as it runs": SampleTuning(),
    "small lists": SampleTuning(
        chunk=32, groups=64, listed=4, list_tile=4, row_tile=64, wide_tile=32, num_warps=1
    ),
    "long lists": SampleTuning(
        chunk=64, groups=16, listed=256, list_tile=32, row_tile=32, wide_tile=16, num_warps=1
    ),
}


def share(device: str, some: int, many: int) -> int:
    """How many the interpreter gets, and how many compiled kernels."""
    return some if interpreted_on(device) else many


@pytest.fixture(autouse=True)
def _used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launches hand on lies in memory that holds something: very likely tokens with odd ids."""
    make = Scratch.make

    def used(*arguments: Any) -> Scratch:
        scratch = make(*arguments)
        for field in fields(scratch):
            tensor = getattr(scratch, field.name)
            tensor.fill_(1e9 if tensor.is_floating_point() else -77)
        return scratch

    monkeypatch.setattr(Scratch, "make", used)


#: who searches rows whose lists are too short: one program; or several, those without top-k or all of them
WIDE: dict[str, dict[str, Any]] = {
    "one program": {},
    "nuclei": {"wide_nucleus": True},
    "all": {"wide_top_k": True},
}


def drawn(
    logits: torch.Tensor,
    rows: list[dict[str, Any]],
    device: str,
    tuning: SampleTuning | None = None,
    wide: str = "one program",
) -> list[int]:
    """Tokens of the kernels."""
    at = torch.device(device)
    tokens = sample_tokens(logits.to(at), make_batch(rows, at, **WIDE[wide]), tuning)
    assert tokens.dtype == torch.int64
    assert tokens.device.type == device
    found: list[int] = tokens.tolist()
    return found


@nightly(INTERPRETER)
@pytest.mark.parametrize(
    "tuning",
    grid(
        [pytest.param(TUNINGS["small lists"], id="small lists")],
        [pytest.param(tuning, id=name) for name, tuning in TUNINGS.items() if name != "small lists"],
        INTERPRETER,
    ),
)
@pytest.mark.parametrize("wide", grid(["one program", "all"], ["nuclei"], INTERPRETER))
@pytest.mark.parametrize("vocab", grid([150], [1]))
def test_every_row_equals_the_plain_implementation(
    device: str, vocab: int, tuning: SampleTuning, wide: str
) -> None:
    """Greedy and filtered rows, ties, infinities, broken rows, temperatures from nothing to 100."""
    for seed in range(share(device, 1, 200)):
        rng = np.random.default_rng([seed, vocab, tuning.listed])
        lines = [random_logits(rng, vocab) for _ in range(6)]
        rows = [random_row(rng) for _ in range(6)]
        before = torch.from_numpy(np.stack(lines))
        logits = before.clone()
        wanted = [reference(line, row) for line, row in zip(lines, rows, strict=True)]
        assert drawn(logits, rows, device, tuning, wide) == wanted, (seed, rows)
        assert torch.equal(before.nan_to_num(), logits.nan_to_num()), "the logits were written to"


@nightly(INTERPRETER)
@pytest.mark.parametrize("vocab", [50_257, 262_144])
def test_large_vocabularies_equal_the_torch_path_on_the_same_device(device: str, vocab: int) -> None:
    """Peaked rows, whose candidates fit a list, and flat ones."""
    at, number = torch.device(device), share(device, 2, 33)
    for seed in range(share(device, 1, 6)):
        rng = np.random.default_rng([seed, vocab])
        logits = torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(number)])).to(at)
        batch = make_batch([{**random_row(rng), "temperature": 1.0} for _ in range(number)], at)
        wanted = Sampler(40, vocab, at, "torch").sample(logits, batch)
        assert torch.equal(Sampler(40, vocab, at, "triton").sample(logits, batch), wanted), seed


def filtered(device: str, tuning: str, wide: str = "one program") -> tuple[list[int], list[int]]:
    """What is drawn and what should be."""
    rows = telling_rows()
    lines = torch.from_numpy(np.stack([LINE] * len(rows)))
    return drawn(lines, rows, device, TUNINGS[tuning], wide), [reference(LINE, row) for row in rows]


@nightly(INTERPRETER)
@pytest.mark.parametrize(
    ("tuning", "wide"),
    points(
        [("long lists", "one program"), ("small lists", "all")],
        [("small lists", "one program"), ("small lists", "nuclei")],
        INTERPRETER,
    ),
)
def test_filters_keep_neither_more_nor_less(device: str, tuning: str, wide: str) -> None:
    got, wanted = filtered(device, tuning, wide)
    assert got == wanted


@nightly(INTERPRETER)
@pytest.mark.parametrize("name", grid([*EDGES][:3], [*EDGES][3:], INTERPRETER))
def test_edges(device: str, name: str) -> None:
    line = np.array(EDGES[name], np.float32)
    wanted = [reference(line, row) for row in MIXED]
    lines = torch.from_numpy(np.stack([line] * 4))
    for wide in ("one program", "all"):
        assert drawn(lines, MIXED, device, TUNINGS["small lists"], wide) == wanted, wide


def test_no_rows_give_no_tokens(device: str) -> None:
    empty = SamplingBatch(*(torch.zeros(0, device=device),) * 10, False, True, True, True, False)
    assert sample_tokens(torch.zeros(0, 30, device=device), empty).shape == (0,)


@nightly(INTERPRETER)
def test_a_row_depends_on_itself_alone(device: str) -> None:
    """Not on its company, the flags of the batch, nor on how logits and parameters lie in memory."""
    at = torch.device(device)
    rng = np.random.default_rng(3)
    rows = [random_row(rng) for _ in range(share(device, 4, 50))]
    logits = torch.from_numpy(np.stack([random_logits(rng, 90) for _ in rows])).to(at)
    tuning = TUNINGS["long lists"]
    together = sample_tokens(logits, make_batch(rows, at), tuning).tolist()
    order = rng.permutation(len(rows)).tolist()
    shuffled = make_batch([rows[index] for index in order], at)
    # As a graph has it: every flag set, or none.
    flags: dict[str, Any] = {"any_top_k": True, "any_top_p": True, "any_min_p": True, "all_greedy": False}
    wide = torch.full((len(rows), 100), math.nan, device=at)
    wide[:, :90] = logits[order]
    for name in ("temperature", "top_p", "min_p", "top_k", "seeds", "positions"):
        flags[name] = getattr(shuffled, name).repeat_interleave(2)[::2]
    for lying in (wide[:, :90], logits[order].T.contiguous().T):
        got = sample_tokens(lying, replace(shuffled, **flags), tuning).tolist()
        assert got == [together[index] for index in order]


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
    monkeypatch.setattr(triton_scan, "_guess", lambda *arguments: GUESSES[guess](arguments[2]))
    rows = [{"top_k": 5, "seed": 3}, {"top_p": 0.7, "seed": 4}, {"top_k": 9, "top_p": 0.5, "seed": 5}]
    wanted = [reference(LINE, row) for row in rows]
    logits = torch.from_numpy(np.stack([LINE] * 3))
    for listed in (16, 128):
        for wide in WIDE:
            tuning = SampleTuning(chunk=64, listed=listed)
            assert drawn(logits, rows, device, tuning, wide) == wanted, wide


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
    for position in range(share(device, 6, 100)):
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
    from tests.model.kernels import kernels_or_skip

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
    for _ in range(share("cuda", 2, 20)):
        batch = make_batch([random_row(rng) for _ in range(count)], at)
        logits.copy_(torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(count)])))
        for name in ("positions", "seeds", "temperature", "top_p", "min_p", "top_k"):
            getattr(fixed, name).copy_(getattr(batch, name))
        graph.replay()
        assert torch.equal(tokens, Sampler(count, vocab, at, "torch").sample(logits, batch))
