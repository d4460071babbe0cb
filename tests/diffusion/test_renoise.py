"""Renoise, from logits that are made up: rows have nothing to do with each other, and corners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioinfer.diffusion.algorithms.renoise import Renoise
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.record import BlockRecords
from aioinfer.diffusion.state import BlockState
from aioinfer.params import DiffusionParams, SamplingParams
from tests.diffusion.renoise_reference import CanvasRow

SIZE, VOCAB = 6, 37


def begun(given: list[list[int]], starts: list[int]) -> Block:
    records = BlockRecords(SIZE, 0, 1)
    states = [BlockState.unknown(start, ids, SIZE, 0) for ids, start in zip(given, starts, strict=True)]
    table = torch.stack([torch.from_numpy(records.encode(state, state.start)) for state in states])
    return records.block(table)[0]


def state_of(rows: list[dict[str, Any]], seeds: list[int], temperatures: list[float]) -> Rows:
    params = [DiffusionParams(algorithm="renoise", **row) for row in rows]
    sampling = [
        SamplingParams(temperature=each, seed=seed) for each, seed in zip(temperatures, seeds, strict=True)
    ]
    return Renoise.init_state(params, sampling, seeds)


class Model:
    """Logits of a canvas that follow from its tokens and from the last distribution, sharper each round."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._words = torch.randn(VOCAB, 5, generator=generator, dtype=torch.float64)
        self._mixed = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
        self.rounds = 0

    def __call__(self, canvas: list[int], last: torch.Tensor | None) -> torch.Tensor:
        self.rounds += 1
        soft = 0.0 if last is None else last.double().softmax(-1) @ self._words
        return (
            (self._mixed @ (self._words[torch.tensor(canvas)] + soft))
            @ self._words.T
            * 0.4
            * self.rounds**0.5
        )


ROWS: list[dict[str, Any]] = [
    {"entropy_bound": 0.5, "steps": 9, "confidence_threshold": 0.4},
    {"entropy_bound": 0.0, "steps": 5},
    {"entropy_bound": 50.0, "stability_threshold": 2, "confidence_threshold": 0.6, "steps": 20},
    {"stability_threshold": 0, "confidence_threshold": 2.0},
    {"t_min": 1.0, "t_max": 2.0, "steps": 3},
]
SEEDS, TEMPERATURES = [1, -5, 2**62, 0, 9], [1.0, 0.0, 0.5, 1.5, 1.0]
STARTS, GIVEN = [0, 17, 5, 1000, 3], [[], [3], [], [1, 2, 3], []]


def described() -> list[CanvasRow]:
    found = []
    for at, params in enumerate(ROWS):
        row = CanvasRow(SIZE, VOCAB, STARTS[at], SEEDS[at], params, TEMPERATURES[at], GIVEN[at])
        row.run(Model(at))
        found.append(row)
    return found


def test_rows_of_one_call_are_those_of_a_plain_sampler() -> None:
    block, state = begun(GIVEN, STARTS), state_of(ROWS, SEEDS, TEMPERATURES)
    algorithm, models, rounds = Renoise(0), [Model(at) for at in range(len(ROWS))], 0
    state["canvas"] = canvas = torch.zeros(len(ROWS), SIZE, dtype=torch.int64)
    last: list[torch.Tensor | None] = [None] * len(ROWS)
    while not block.done.all():
        read = algorithm.begin(block, canvas, state, VOCAB)
        canvas.copy_(read)
        temperatures = algorithm.temperatures(block, state)
        logits = torch.stack(
            [model(ids, each) for model, ids, each in zip(models, read.tolist(), last, strict=True)]
        )
        last = [*(logits / temperatures[:, None, None])]
        before = {name: column.clone() for name, column in block.columns().items()}
        algorithm.step(logits.float(), block, state)
        for name in ("ids", "logprobs", "written_in", "rounds"):
            kept = before["done"].view(-1, *[1] * (before[name].dim() - 1))
            assert torch.where(kept, block.columns()[name] == before[name], True).all(), name
        assert block.changed.tolist() == (~before["done"]).tolist()
        rounds += 1
        assert rounds < 60
    for at, row in enumerate(described()):
        first = len(GIVEN[at])
        assert block.rounds[at] == row.rounds
        assert block.ids[at, first:].tolist() == row.ids[first:]
        assert block.ids[at, :first].tolist() == GIVEN[at]
        assert block.written_in[at].tolist() == row.written_in
        assert block.logprobs[at, first:].tolist() == pytest.approx(row.logprobs[first:], abs=1e-5)
        assert block.known[at].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_alone(value: float) -> None:
    block = begun([[], [4], []], [0, 0, 0])
    state = state_of([{"steps": 4}] * 3, [1, 2, 3], [1.0] * 3)
    state["canvas"] = torch.zeros(3, SIZE, dtype=torch.int64)
    logits = torch.randn(3, SIZE, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 3, 5] = value
    # What holds a token is not asked for.
    logits[1, 0, 5] = value
    done = Renoise(0).step(logits, block, state)
    assert done.tolist() == block.failed.tolist() == [True, False, False]
    assert block.changed.tolist() == [False, True, True]
    assert block.ids[0].eq(0).all()


def test_without_temperature_and_seed_the_noise_is_that_of_seed_0() -> None:
    params = [DiffusionParams(algorithm="renoise")] * 3
    sampling = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, seed=7), SamplingParams()]
    assert Renoise.init_state(params, sampling, [5, 7, 9])["seed"].tolist() == [0, 7, 9]


def test_random_tokens_are_spread_over_the_vocabulary() -> None:
    block = begun([[]] * 400, [SIZE * at for at in range(400)])
    state = state_of([{}] * 400, [3] * 400, [1.0] * 400)
    empty = torch.zeros(400, SIZE, dtype=torch.int64)
    first = Renoise(0).begin(block, empty, state, VOCAB)
    counts = first.flatten().bincount(minlength=VOCAB)
    assert len(counts) == VOCAB
    assert counts.min() > 0.5 * first.numel() / VOCAB
    assert counts.max() < 1.6 * first.numel() / VOCAB
