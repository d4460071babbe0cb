"""What a row writes is its own affair: any batch, any order, any slot, any device-side loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.diffusion.registry import algorithm_class, usable_algorithms
from aioinfer.params import DiffusionParams, SamplingParams
from tests.diffusion.cases import MASK, VOCAB, Case, Denoiser, fresh, make_case, put_, seen, take, take_blocks
from tests.diffusion.reference import DELETE, SPLIT
from tests.tiers import SECONDS, rest, scaled
from tests.toys.blocks import begin_blocks

ALGORITHMS = pytest.mark.parametrize("algorithm", usable_algorithms((1, 2)))


def crowd(algorithm: str, seed: int) -> Case:
    """Many rows of one block size, drawn and greedy."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([4, 8, 16]))
    found: list[Case] = []
    while sum(len(case.rows) for case in found) < 9:
        case = make_case(algorithm, int(rng.integers(0, 2**31)))
        if case.size == size:
            found.append(case)
    rows = [fresh(row) for case in found for row in case.rows]
    return Case(algorithm, size, torch.float32, rows, [number for case in found for number in case.numbers])


def alone(case: Case, row: int) -> list[dict[str, Any]]:
    """What is seen of a row after each of its rounds, when it has a batch to itself."""
    denoiser = Denoiser.of(case.only([row]))
    rounds = []
    while not denoiser.block.done.all():
        denoiser.step()
        rounds.append(seen(denoiser.block, 0))
    return rounds


@rest(SECONDS)
@ALGORITHMS
def test_a_row_does_not_depend_on_the_batch_around_it(algorithm: str) -> None:
    """Rows live in slots, are taken out in random company and order for a round, and put back."""
    for seed in range(scaled(4)):
        rng = np.random.default_rng(seed)
        case = crowd(algorithm, seed)
        count = len(case.rows)
        expected = [alone(case, row) for row in range(count)]
        slots = rng.permutation(count + 3)[:count]
        everything = Denoiser.of(case.only([*range(count), 0, 0, 0]))
        table, states = everything.block, everything.state
        order = torch.empty(count + 3, dtype=torch.int64)
        order[torch.from_numpy(np.concatenate([slots, np.setdiff1d(np.arange(count + 3), slots)]))] = (
            torch.arange(count + 3)
        )
        table, states = take_blocks(table, order), take(states, order)
        while not all(table.done[slot] for slot in slots):
            company = rng.permutation(count)[: rng.integers(1, count + 1)]
            rows = torch.from_numpy(slots[company])
            block, state = take_blocks(table, rows), take(states, rows)
            logits = [case.logits(row, int(block.rounds[at])) for at, row in enumerate(company)]
            was_done = block.done.clone()
            everything.algorithm.step(torch.stack(logits), block, state)
            put_(table.columns(), rows, block.columns())
            put_(states, rows, state)
            for at, row in enumerate(company):
                if not was_done[at]:
                    assert seen(block, at) == expected[row][int(block.rounds[at]) - 1], (seed, row)


@ALGORITHMS
def test_steps_leave_what_is_done_untouched(algorithm: str) -> None:
    case = crowd(algorithm, 7)
    denoiser = Denoiser.of(case)
    while not denoiser.block.done.all():
        denoiser.step()
    before = {name: column.clone() for name, column in denoiser.block.columns().items()}
    state = {name: column.clone() for name, column in denoiser.state.items()}
    logits = torch.full((len(case.rows), case.size, VOCAB), float("nan"))
    logits[0] = torch.randn(case.size, VOCAB)
    done = denoiser.algorithm.step(logits, denoiser.block, denoiser.state)
    assert done.all()
    assert not denoiser.block.changed.any(), "the forward before the step was over the final tokens"
    for name, column in denoiser.block.columns().items():
        if name != "changed":
            assert torch.equal(column, before[name]), name
    assert all(torch.equal(column, state[name]) for name, column in denoiser.state.items())


@ALGORITHMS
def test_what_the_host_says_of_the_rows_saves_work_and_changes_nothing(algorithm: str) -> None:
    for seed in range(scaled(12, 2)):
        case = crowd(algorithm, 100 + seed)
        for row in case.rows:
            if seed % 2:
                row.sampling["temperature"] = 0.0
            else:
                row.sampling.update(top_p=1.0, top_k=0, min_p=0.0)
        full, spare = Denoiser.of(case), Denoiser.of(case)
        while not full.block.done.all():
            full.step()
            spare.step(drawn=not seed % 2, filtered=False)
            for name, column in full.block.columns().items():
                assert torch.equal(column, spare.block.columns()[name]), (seed, name)


@ALGORITHMS
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(algorithm: str, rows: int) -> None:
    cls = algorithm_class(algorithm)
    block = begin_blocks([[]] * rows, [0] * rows, size=4, mask_id=MASK)
    state = cls.init_state(
        [DiffusionParams(algorithm=algorithm)] * rows, [SamplingParams(temperature=0)] * rows, [1] * rows, 4
    )
    logits = torch.zeros(rows, 4, 2 * VOCAB)[..., ::2]
    for _ in range(4):
        done = cls(MASK, None, (DELETE, SPLIT)).step(logits, block, state)
    assert done.shape == (rows,)
    assert block.masked.sum() == 0
