"""Rows that are denoised from scripted logits, by the package and by the reference side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aioinfer.diffusion.algorithm import Algorithm
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Propose
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.params import DiffusionParams, SamplingParams
from tests.diffusion.reference import DELETE, SPLIT, Row
from tests.toys.blocks import begin_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCAB = 16
MASK = 7


def take(table: Rows, rows: torch.Tensor) -> Rows:
    """Some rows of a table, copied; ``rows`` is [N] int64, in any order."""
    return {name: column.index_select(0, rows) for name, column in table.items()}


def put_(table: Rows, rows: torch.Tensor, values: Rows) -> None:
    """Write ``values``, of N rows, over the rows of a table; ``rows`` is [N] int64 without repetition."""
    for name, column in table.items():
        column.index_copy_(0, rows, values[name])


def take_blocks(block: Block, rows: torch.Tensor) -> Block:
    """Some rows of blocks, copied."""
    return Block(**take(block.columns(), rows))


@dataclass
class Case:
    """Rows of one batch: what they are asked for, and the seed of their logits."""

    algorithm: str
    size: int
    dtype: torch.dtype
    rows: list[Row]
    numbers: list[int]

    def logits(self, row: int, round: int) -> torch.Tensor:
        """[B, V] of one row in one round, the same whatever else there is."""
        return scripted(self.numbers[row], round, self.size).to(self.dtype)

    def only(self, rows: list[int]) -> Case:
        """Some of the rows from their start, in another order."""
        picked = [fresh(self.rows[row]) for row in rows]
        return Case(self.algorithm, self.size, self.dtype, picked, [self.numbers[row] for row in rows])


def fresh(row: Row) -> Row:
    given = list(row.given)
    return Row(row.algorithm, given, row.size, row.mask_id, row.start, dict(row.params), row.sampling)


def scripted(number: int, round: int, size: int) -> torch.Tensor:
    """Logits [B, V] float32: smooth and sharp, ties in and between positions, shares that are exact in any
    arithmetic, masks that are likeliest, and now and then what is no number."""
    rng = np.random.default_rng((number, round))
    logits = rng.normal(0, rng.choice([0.5, 2, 6]), (size, VOCAB))
    if rng.random() < 0.3:
        logits = np.repeat(logits[:1], size, 0)
    if rng.random() < 0.4:
        # One token of k is as likely as the others: 1/k each, in thresholds' exact reach.
        for at in range(size):
            logits[at] = -np.inf
            logits[at, rng.choice(VOCAB, rng.choice([1, 2, 4, 8]), replace=False)] = rng.choice([0, 3, -7])
            logits[at, (MASK + 1 + at % 3) % VOCAB] = logits[at].max()
    if rng.random() < 0.3:
        logits[rng.random(logits.shape) < 0.2] = -np.inf
        logits[:, MASK - 1] = 0
    if rng.random() < 0.3:
        logits[:, MASK] = 20
    if rng.random() < 0.02:
        at = int(rng.integers(0, size))
        logits[at, rng.integers(0, VOCAB)] = rng.choice([np.nan, np.inf])
        logits[at, rng.integers(0, VOCAB)] = -np.inf
    if rng.random() < 0.01:
        logits[rng.integers(0, size), [token for token in range(VOCAB) if token != MASK]] = -np.inf
    return torch.from_numpy(logits.astype(np.float32))


def random_params(algorithm: str, rng: np.random.Generator) -> dict[str, Any]:
    """Some parameters of an algorithm, others left to it."""
    choices: dict[str, list[Any]] = {
        "threshold": [0.0, 0.25, 0.3, 0.5, 0.95, 1.0],
        "edit_threshold": [0.0, 0.25, 0.5, 0.9, 1.0],
        "max_post_edits": [0, 1, 2, 5],
        "penalty": [0.0, 0.5, 3.0],
        "factor": [0.1, 1.0, 1.5, 4.0],
        "entropy_bound": [0.0, 0.15, 1.0, 5.0],
        "steps": [1, 2, 3, 5, 40],
    }
    known = algorithm_class(algorithm).parameters
    return {name: rng.choice(choices[name]).item() for name in known if rng.random() < 0.6}


def random_sampling(rng: np.random.Generator, drawn: bool) -> dict[str, Any]:
    return {
        "temperature": float(rng.choice([0.3, 1.0, 2.0])) if drawn and rng.random() < 0.7 else 0.0,
        "top_p": float(rng.choice([1.0, 1.0, 0.9, 0.4])),
        "top_k": int(rng.choice([0, 0, 3])),
        "min_p": float(rng.choice([0.0, 0.0, 0.1])),
        "seed": int(rng.integers(-(2**62), 2**62)),
    }


def make_case(algorithm: str, seed: int) -> Case:
    """A random case; all of it follows from its seed."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([4, 5, 8, 16, 32]))
    count = int(rng.integers(1, 5))
    drawn = bool(rng.random() < 0.5)
    rows = []
    for _ in range(count):
        tail = int(
            rng.choice([0, 0, 1, size - 1, int(rng.integers(0, size)), size], p=[0.2] * 4 + [0.15, 0.05])
        )
        given = [int(token) for token in rng.choice([MASK, *range(VOCAB)], tail)]
        start = int(rng.integers(0, 2000)) * size
        params = random_params(algorithm, rng)
        rows.append(Row(algorithm, given, size, MASK, start, params, random_sampling(rng, drawn)))
    dtype = DTYPES[int(rng.choice([0, 0, 1, 2]))]
    return Case(algorithm, size, dtype, rows, [int(rng.integers(0, 2**31)) for _ in rows])


@dataclass
class Denoiser:
    """The package's side of a case."""

    case: Case
    algorithm: Algorithm
    block: Block
    state: Rows

    @classmethod
    def of(cls, case: Case, mask_id: int = MASK, propose: Propose | None = None) -> Denoiser:
        algorithm = algorithm_class(case.algorithm)
        block = begin_blocks(
            [row.given for row in case.rows], [row.start for row in case.rows], size=case.size, mask_id=MASK
        )
        known = algorithm.parameters
        params = [
            DiffusionParams(
                algorithm=case.algorithm, **{name: row.params[name] for name in known if name in row.params}
            )
            for row in case.rows
        ]
        sampling = [SamplingParams(**row.sampling) for row in case.rows]
        seeds = [row.sampling["seed"] for row in case.rows]
        state = algorithm.init_state(params, sampling, seeds, case.size)
        return cls(case, algorithm(mask_id, propose, (DELETE, SPLIT)), block, state)

    def step(self, *, drawn: bool = True, filtered: bool = True) -> None:
        rounds = self.block.rounds.tolist()
        logits = torch.stack([self.case.logits(row, rounds[row]) for row in range(len(rounds))])
        before = logits.clone()
        self.algorithm.step(logits, self.block, self.state, drawn=drawn, filtered=filtered)
        assert torch.equal(logits.nan_to_num(9), before.nan_to_num(9)), "logits are not written to"


def seen(block: Block, row: int) -> dict[str, Any]:
    """What a caller can see of one row, to compare with a reference's."""
    names = ("ids", "known", "written_in", "rounds", "done", "changed", "failed")
    return {name: getattr(block, name)[row].tolist() for name in names}


def assert_agrees(case: Case, mask_id: int = MASK, propose: Propose | None = None) -> int:
    """Token for token and step for step, until all rows are done and a step more. Returns the steps."""
    denoiser = Denoiser.of(case, mask_id, propose)
    for steps in range(1, case.size + 16 + 4):
        finished = all(row.done for row in case.rows)
        for number, row in enumerate(case.rows):
            row.step(case.logits(number, row.rounds))
        denoiser.step()
        for number, row in enumerate(case.rows):
            found = seen(denoiser.block, number)
            wanted = {name: getattr(row, name) for name in found}
            assert found == wanted, (number, steps, row.params, row.sampling)
            torch.testing.assert_close(
                denoiser.block.logprobs[number], torch.tensor(row.logprobs), rtol=1e-4, atol=1e-4
            )
        if finished:
            return steps
    raise AssertionError("rows do not come to an end")
