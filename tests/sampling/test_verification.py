"""Rows that verify drafts draw what decoding token by token draws, on every backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.sampling.batch import PenaltyReset, SamplingBatch
from aioinfer.sampling.outcomes import BAD_LOGITS, NO_TOKEN
from aioinfer.sampling.sampler import COLUMNS, Sampler
from aioinfer.sampling.verification import DraftRows, Drafts, accepted, select
from tests.sampling.support import CPU, make_batch
from tests.tiers import scaled

VOCAB = 97


def drafts_of(rows: DraftRows, usable: dict[int, int] | None = None, *, levels: bool = False) -> Drafts:
    made = rows.levels() if levels else []
    return Drafts(
        torch.from_numpy(rows.start),
        torch.from_numpy(rows.cut(usable or {})),
        list(map(torch.from_numpy, made)),
    )


def test_the_rows_of_a_step_are_expanded_where_there_are_drafts() -> None:
    rows = DraftRows.of(2, [[7, 8], [9]], 5)
    assert rows.rows.tolist() == [0, 1, 2, 2, 2, 3, 3, 4]
    assert rows.behind.tolist() == [0, 0, 2, 1, 0, 1, 0, 0]
    assert rows.start.tolist() == [0, 1, 2, 2, 2, 5, 5, 7]
    assert rows.expected.tolist() == [-1, -1, 7, 8, -1, 9, -1, -1]
    assert rows.first == [2, 5]
    assert [level.tolist() for level in rows.levels()] == [[0, 1, 2, 5, 7], [3, 6], [4]]
    assert rows.cut({2: 2}).tolist() == [-1, -1, 7, -1, -1, 9, -1, -1]


@pytest.mark.parametrize(
    ("tokens", "counted"),
    [
        ([1, 7, 8, 3, 9, 4], [1, 1, 1, 1, 1, 1]),
        ([1, 7, 5, 3, 9, 4], [1, 1, 1, 0, 1, 1]),
        ([1, 6, 8, 3, 2, 4], [1, 1, 0, 0, 1, 0]),
        ([1, BAD_LOGITS, 8, 3, 9, BAD_LOGITS], [1, 1, 0, 0, 1, 1]),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_its_draft(tokens: list[int], counted: list[int]) -> None:
    rows = DraftRows.of(1, [[7, 8], [9]], 3)
    counts, last = accepted(torch.tensor(tokens), drafts_of(rows))
    assert counts.int().tolist() == counted
    assert last.int().tolist() == [
        int(counted[at] and (at + 1 == 6 or rows.start[at + 1] != rows.start[at] or not counted[at + 1]))
        for at in range(6)
    ]


def random_batch(rng: random.Random, rows: Sequence[int]) -> SamplingBatch:
    """Parameters by slot; a row for each of ``rows``, its slot."""
    penalised = rng.random() < 0.6
    by_slot: dict[int, dict[str, Any]] = {
        slot: {
            "slot": slot,
            "temperature": rng.choice([0.0, 0.7, 1.5]),
            "top_p": rng.choice([1.0, 0.8]),
            "min_p": rng.choice([0.0, 0.1]),
            "top_k": rng.choice([0, 5]),
            "seed": rng.randrange(1000),
            **(random_penalties(rng) if penalised else {}),
        }
        for slot in sorted(set(rows))
    }
    return make_batch([by_slot[slot] for slot in rows])


def random_penalties(rng: random.Random) -> dict[str, float]:
    return {
        "repetition_penalty": rng.choice([1.0, 1.4]),
        "presence_penalty": rng.choice([0.0, 0.9]),
        "frequency_penalty": rng.choice([0.0, 0.7]),
    }


def resets(slots: Sequence[int]) -> list[PenaltyReset]:
    return [PenaltyReset(slot, [slot, 5, 6], [7, 7]) for slot in slots]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("seed", range(scaled(200)))
def test_a_row_with_drafts_draws_what_one_token_after_the_other_does(backend: str, seed: int) -> None:
    """With any drafts, filters, penalties and bans; and the counts of penalties are the same afterwards."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [rng.choice([0, 0, 1, 3, 6]) for _ in range(rng.randrange(1, 5))]
    lengths.sort(key=bool)  # those without drafts first
    first_length = sum(not length for length in lengths)
    slots = list(range(1, len(lengths) + 1))
    count = [length + 1 for length in lengths]
    logits = torch.randn(sum(count), VOCAB) * 3
    begins = np.cumsum([0, *count])
    plain, verifying = (Sampler(8, VOCAB, CPU, backend) for _ in range(2))
    batch = random_batch(
        rng, [slot for slot, number in zip(slots, count, strict=True) for _ in range(number)]
    )
    batch.positions = torch.tensor([10 + at for number in count for at in range(number)])
    if rng.random() < 0.5:
        batch.banned_rows = torch.tensor([rng.randrange(sum(count)) for _ in range(3)])
        batch.banned_ids = torch.tensor([rng.randrange(VOCAB) for _ in range(3)])
    plain.reset(resets(slots))
    # Token by token, as decoding does: what is drawn at every position if those before were the drafts.
    drafts: list[list[int]] = [[] for _ in lengths]
    expected: list[list[int]] = [[] for _ in lengths]
    for row, number in enumerate(count):
        for offset in range(number):
            at = int(begins[row]) + offset
            (token,) = plain.sample(logits[at : at + 1], select(batch, torch.tensor([at]), COLUMNS)).tolist()
            expected[row].append(token)
            if offset == number - 1:
                break
            wrong = rng.random() < 0.3
            drafts[row].append((token + 1) % VOCAB if wrong else token)
            if wrong:
                drafts[row] += [rng.randrange(VOCAB) for _ in range(number - 2 - offset)]
                break
    rows = DraftRows.of(first_length, drafts[first_length:], len(lengths))
    tokens, last = verifying.verify(
        logits,
        replace(batch, penalty_resets=resets(slots)),
        drafts_of(rows, levels=batch.any_penalty),
    )
    for row, number in enumerate(count):
        found = tokens[begins[row] : begins[row] + number].tolist()
        wanted = [*expected[row], *[NO_TOKEN] * (number - len(expected[row]))]
        assert found == wanted, (seed, row)
        ends = last[begins[row] : begins[row] + number].tolist()
        assert ends == [slots[row] if at == len(expected[row]) - 1 else 0 for at in range(number)]
    # Each has counted the same tokens.
    if batch.any_penalty:
        for slot in slots:
            counts = [
                sampler._penalties._counts[sampler._penalties._row_of[slot]] for sampler in (plain, verifying)
            ]
            assert torch.equal(*counts)


def test_selected_rows_keep_their_bans_and_filters() -> None:
    rng = random.Random(0)
    batch = random_batch(rng, [1, 2, 3, 4])
    batch.banned_rows, batch.banned_ids = torch.tensor([3, 0, 3]), torch.tensor([10, 11, 12])
    part = select(batch, torch.tensor([3, 1]), COLUMNS)
    assert part.slots.tolist() == [4, 2]
    assert part.banned_rows is not None
    assert part.banned_ids is not None
    assert list(zip(part.banned_rows.tolist(), part.banned_ids.tolist(), strict=True)) == [(0, 10), (0, 12)]
