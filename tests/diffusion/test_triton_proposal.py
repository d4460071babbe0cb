"""The kernels that propose tokens of blocks: what torch's operations propose, whatever part of it is wanted.

In the interpreter, where a position takes tens of milliseconds, with few of them; compiled, with many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.diffusion.proposal import Asked, Proposal, propose
from aioinfer.diffusion.registry import usable_algorithms
from tests.diffusion.cases import assert_agrees, make_case
from tests.model.kernels import DEVICES, interpreted_on, interpreted_only, kernels_or_skip
from tests.tiers import INTERPRETER, nightly, points

pytest.importorskip("triton", reason="triton is not installed")

from aioinfer.diffusion import triton_proposal
from aioinfer.sampling.triton_lines import SampleTuning

#: lists that hold less than most filters keep, and chunks of less than a small vocabulary
SMALL = SampleTuning(chunk=16, groups=32, listed=4, list_tile=4, wide_tile=16, num_warps=1)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where kernels run in this process."""
    kernels_or_skip(request.param)
    with np.errstate(all="ignore"):
        yield request.param


def problem(
    rng: np.random.Generator, rows: int, size: int, vocab: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, Asked]:
    """Sharp and flat positions, what cannot be proposed and what is no number; rows of all kinds."""
    logits = rng.normal(0, rng.choice([0.05, 1, 4], (rows, size, 1)), (rows, size, vocab))
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    logits[..., 3] = rng.choice([0.0, 9.0], (rows, size))
    logits[0, 0, vocab - 1] = rng.choice([np.nan, np.inf, 0.0])
    some: dict[str, list[Any]] = {
        "temperature": [0.0, 0.5, 1.0, 3.0],
        "top_p": [1.0, 0.9, 0.5],
        "min_p": [0.0, 0.0, 0.05],
        "top_k": [0, 0, 5, vocab // 2],
    }
    sampling = {name: torch.from_numpy(rng.choice(values, rows)) for name, values in some.items()}
    sampling = {name: column.float() if name != "top_k" else column for name, column in sampling.items()}
    sampling["seed"] = torch.from_numpy(rng.integers(-(2**62), 2**62, rows))
    asked = Asked(
        positions=torch.from_numpy(rng.integers(0, 4000, (rows, 1)) + np.arange(size)).to(device),
        rounds=torch.from_numpy(rng.integers(0, 9, rows)).to(device),
        sampling={name: column.to(device) for name, column in sampling.items()},
        wanted=torch.from_numpy(rng.random((rows, size)) < 0.8).to(device),
        mask_id=3,
        lowered=(
            torch.from_numpy(rng.integers(-1, vocab, (rows, size))).to(device),
            torch.from_numpy(rng.choice([0.0, 2.0], rows)).float().to(device),
        ),
        entropy=True,
    )
    return torch.from_numpy(logits).to(dtype).to(device), asked


def assert_alike(found: Proposal, expected: Proposal, wanted: torch.Tensor) -> None:
    """At the positions that are wanted; tokens are equal, and the rest is about a rounding apart."""
    assert torch.equal(found.valid[wanted], expected.valid[wanted])
    at = wanted & expected.valid
    assert torch.equal(found.tokens[at], expected.tokens[at])
    for name, bound in {"confidence": 1e-6, "logprobs": 2e-6, "mass": 1e-6, "entropy": 2e-6}.items():
        got, other = getattr(found, name), getattr(expected, name)
        if other is not None:
            torch.testing.assert_close(got[at], other[at], rtol=bound, atol=bound, msg=name)


@nightly(INTERPRETER)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    points(
        [(50, torch.float32)],
        [(9001, torch.bfloat16), (1, torch.float32), (70, torch.float16)],
        INTERPRETER,
    ),
)
def test_proposals_are_those_of_torch(
    device: str, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lists that are too short; and as it runs, where a nucleus has thousands of tokens."""
    if vocab < 4096:
        monkeypatch.setattr(triton_proposal, "_TUNING", SMALL)
    for seed in range(2 if interpreted_on(device) else 100):
        rng = np.random.default_rng([seed, vocab])
        logits, asked = problem(rng, 3, 2, max(vocab, 4), device, dtype)
        before = logits.clone()
        found = triton_proposal.propose(logits, asked)
        assert torch.equal(logits.nan_to_num(9), before.nan_to_num(9)), "logits are not written to"
        assert_alike(found, propose(logits, asked), asked.wanted)


@nightly(INTERPRETER)
@pytest.mark.parametrize(("drawn", "filtered"), points([(True, False)], [(False, False)], INTERPRETER))
def test_what_the_host_says_saves_work_and_changes_no_bit(device: str, drawn: bool, filtered: bool) -> None:
    logits, asked = problem(np.random.default_rng(5), 2, 2, 40, device, torch.float32)
    off = {"top_p": 1.0, "min_p": 0.0, "top_k": 0, **({} if drawn else {"temperature": 0.0})}
    sampling = {
        name: torch.full_like(column, off[name]) if name in off else column
        for name, column in asked.sampling.items()
    }
    asked = replace(asked, sampling=sampling)
    full = triton_proposal.propose(logits, asked)
    spare = triton_proposal.propose(logits, replace(asked, drawn=drawn, filtered=filtered, entropy=False))
    for name in ("tokens", "confidence", "logprobs", "valid"):
        assert torch.equal(getattr(full, name), getattr(spare, name)), name
    assert spare.entropy is None


@nightly(INTERPRETER)
def test_a_position_depends_on_itself_alone(device: str) -> None:
    """To the bit, and positions that are not wanted are not even read."""
    logits, asked = problem(np.random.default_rng(8), 3, 3, 60, device, torch.float32)
    together = triton_proposal.propose(logits, asked)
    logits[~asked.wanted] = float("nan")
    assert asked.lowered is not None
    for row in range(3):
        own = replace(
            asked,
            positions=asked.positions[[row]],
            rounds=asked.rounds[[row]],
            sampling={
                name: column.repeat_interleave(2)[2 * row :: 2][:1] for name, column in asked.sampling.items()
            },
            wanted=asked.wanted[[row]],
            lowered=(asked.lowered[0][[row]], asked.lowered[1][[row]]),
        )
        alone = triton_proposal.propose(logits[[row]], own)
        for name in ("tokens", "confidence", "logprobs", "valid", "mass", "entropy"):
            got, wanted = getattr(alone, name)[0], getattr(together, name)[row]
            where = own.wanted[0] & alone.valid[0] if name in ("mass", "entropy") else own.wanted[0]
            assert torch.equal(got[where], wanted[where]), (row, name)
        assert not alone.tokens[0][~own.wanted[0]].any(), "there is no token where none is wanted"


@nightly(INTERPRETER)
@interpreted_only
@pytest.mark.parametrize("algorithm", usable_algorithms((1, 2)))
def test_rounds_are_the_reference_s(device: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_proposal, "_TUNING", SMALL)
    cases = (make_case(algorithm, seed) for seed in range(1000))
    few = (case for case in cases if case.size <= 5 and len(case.rows) <= 2)
    for _ in range(2):
        assert_agrees(next(few), propose=triton_proposal.propose)
