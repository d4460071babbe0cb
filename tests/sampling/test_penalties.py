"""Penalties against the formulas, and the counts that live on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.execution.decoding.sampling_metadata import SamplingTable
from aioinfer.params import SamplingParams
from aioinfer.sampling.backend import SamplingBackend
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.penalties import Penalties, penalise_counted
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.step import NewRequestData
from tests.sampling.support import CPU, make_batch, penalise, reference

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 0.4},
]


@pytest.mark.parametrize("vocab", [12, 5000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", PENALTIES)
def test_tokens_count_before_the_host_knows_them(
    row: dict[str, Any], temperature: float, vocab: int, sampling: SamplingBackend
) -> None:
    """30 tokens, each step counting the one before on the device, equal the formulas and a sampler that
    starts from the tokens so far."""
    rng = np.random.default_rng(1)
    prompt, output = [1, 2, 3, 3], [4]
    row = {**row, "temperature": temperature, "seed": 5, "slot": 2}
    sampler = Sampler(4, vocab, CPU, sampling)
    resets = [PenaltyReset(2, prompt, list(output))]
    for step in range(30):
        row["position"] = step
        # Few tokens are likely, so that they come again.
        logits = rng.normal(0, 1.5, vocab).astype(np.float32)
        logits[12:] -= 50
        tensor = torch.from_numpy(logits[None])
        token = int(sampler.sample(tensor, make_batch([row], penalty_resets=resets)))
        assert token == reference(penalise(logits, prompt, output, row), row), (step, output)
        late = make_batch([row], penalty_resets=[PenaltyReset(2, prompt, list(output))])
        assert token == int(Sampler(4, vocab, CPU, sampling).sample(tensor, late)), (step, output)
        output.append(token)
        resets = []


@pytest.mark.parametrize("vocab", [8, 5000])
def test_a_new_request_of_a_slot_inherits_no_counts(vocab: int, sampling: SamplingBackend) -> None:
    sampler = Sampler(4, vocab, CPU, sampling)
    logits = torch.zeros(1, vocab)
    logits[0, :8] = torch.arange(8.0)
    first = {"frequency_penalty": 2.0, "temperature": 0.0, "slot": 1}
    for step in range(5):
        resets = [PenaltyReset(1, [0], [])] if step == 0 else []
        sampler.sample(logits, make_batch([first], penalty_resets=resets))
    neutral = {"temperature": 0.0, "slot": 1}
    beside = {"presence_penalty": 0.5, "temperature": 0.0, "slot": 2}
    batch = make_batch([neutral, beside], penalty_resets=[PenaltyReset(2, [0], [])])
    assert sampler.sample(logits.expand(2, -1), batch).tolist() == [7, 7]
    again = make_batch([first], penalty_resets=[PenaltyReset(1, [0], [])])
    assert sampler.sample(logits, again).tolist() == [7]


def test_neutral_rows_stay_the_same_to_the_bit_even_over_stale_counts() -> None:
    penalties = Penalties(3, 40, CPU)
    penalties.reset([PenaltyReset(1, [1, 2], [3, 3]), PenaltyReset(2, [5], [6])])
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 4] = -0.0
    logits[0, 5] = -torch.inf
    batch = make_batch([{"slot": 1}, {"slot": 2, "repetition_penalty": 1.2}, {"slot": 3}])
    got = penalties.apply(logits, batch)
    assert torch.equal(got.view(torch.int32)[[0, 2]], logits.view(torch.int32)[[0, 2]])
    assert not torch.equal(got[1], logits[1])
    every_token = penalise_counted(
        logits,
        penalties._counts[[1, 2, 0]],
        batch.repetition_penalty.unsqueeze(1),
        batch.presence_penalty.unsqueeze(1),
        batch.frequency_penalty.unsqueeze(1),
    )
    assert torch.equal(got.view(torch.int32), every_token.view(torch.int32)), "the way of other devices"


def test_a_slot_without_a_row_counts_nothing() -> None:
    """Nor does a row that failed. Row 0 stands for all slots without penalties and must stay empty."""
    penalties = Penalties(3, 10, CPU)
    penalties.reset([PenaltyReset(2, [], [])])
    batch = make_batch([{"slot": 1}, {"slot": 2}, {"slot": 2}, {"slot": 2}])
    penalties.record(batch, torch.tensor([4, 5, 5, BAD_LOGITS]))
    assert penalties._counts[0].count_nonzero() == 0
    assert penalties._counts[penalties._row_of[2]].tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0]


def test_rows_are_made_on_demand_and_used_again() -> None:
    penalties = Penalties(100, 10, CPU)
    assert len(penalties._counts) == 1
    penalties.reset([PenaltyReset(40, [1], [])])
    assert len(penalties._counts) == 2
    for slot in (41, 42, 43):
        penalties.reset([PenaltyReset(slot - 1, penalised=False)])
        penalties.reset([PenaltyReset(slot, [slot % 10], [])])
        assert len(penalties._counts) == 2
        assert penalties._counts[1].nonzero().flatten().tolist() == [slot % 10]
    penalties.reset([PenaltyReset(43, [], [9]), PenaltyReset(44, [], [8, 8])])
    assert penalties._counts[1].tolist() == [0] * 9 + [1]
    assert int(penalties._counts[penalties._row_of[44], 8]) == 2
    penalties.reset([PenaltyReset(7, penalised=False)])
    for slot in range(1, 101):
        penalties.reset([PenaltyReset(slot, [slot % 10], [])])
    # Those of slots 0 to 100 and the empty one.
    assert len(penalties._counts) == 102
    rows = penalties._row_of[1:].tolist()
    assert sorted(rows) == list(range(1, 101))
    for slot, row in enumerate(rows, 1):
        assert penalties._counts[row].nonzero().flatten().tolist() == [slot % 10]


def test_a_request_without_penalties_releases_the_row_of_the_slots_previous_request() -> None:
    """The host decides, without reading the device."""
    parameters, sampler = SamplingTable(9), Sampler(9, 10, CPU)

    def resets_of(*slots: int, **params: float) -> list[PenaltyReset]:
        admission = NewRequestData(SamplingParams(**params), 0, frozenset(), [1], [])
        resets = [parameters.admit(slot, admission) for slot in slots]
        return [reset for reset in resets if reset is not None]

    assert resets_of(*range(1, 9)) == []
    for slot in range(1, 9):
        resets = [*resets_of(max(slot - 1, 1)), *resets_of(slot, presence_penalty=1.0)]
        rows = [{"slot": max(slot - 1, 1)}, {"slot": slot, "presence_penalty": 1.0}]
        sampler.sample(torch.zeros(2, 10), make_batch(rows, penalty_resets=resets))
        assert list(sampler._penalties._used) == [slot]
    assert len(sampler._penalties._counts) == 2
    sampler.reset(resets_of(8))
    assert sampler._penalties._used == {}
    assert not sampler._penalties._row_of.any()


def test_counts_may_be_reset_by_a_step_that_samples_nothing(sampling: SamplingBackend) -> None:
    """The first chunk of a long prompt takes the slot; a later step samples."""
    sampler = Sampler(2, 6, CPU, sampling)
    sampler.reset([PenaltyReset(1, [5], [])])
    row = {"slot": 1, "temperature": 0.0, "repetition_penalty": 10.0}
    assert int(sampler.sample(torch.arange(6.0)[None], make_batch([row]))) == 4


@pytest.mark.gpu
def test_counts_that_grow_leave_no_memory_to_others_that_is_still_read() -> None:
    """They were made on another stream than that of the steps, where it looks free once it is let go."""
    vocab, cuda = 1 << 20, torch.device("cuda")
    ids = list(range(0, vocab, 3))
    penalties = Penalties(8, vocab, cuda)
    penalties.reset([PenaltyReset(1, ids)])
    torch.cuda.synchronize()
    # As many rows as there are: the next slot makes them grow.
    steps = torch.cuda.Stream()
    with torch.cuda.stream(steps):
        torch.ones(1 << 24, device=cuda).sin_().sum()
        penalties.reset([PenaltyReset(2, [5])])
    junk = [torch.full((2, vocab), -7, dtype=torch.int32, device=cuda) for _ in range(4)]
    torch.cuda.current_stream().synchronize()
    steps.synchronize()
    counts = penalties._counts[penalties._row_of[1]]
    assert counts.nonzero().flatten().tolist() == ids
    assert all(bool((each == -7).all()) for each in junk)
