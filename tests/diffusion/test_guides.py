"""A guide may need more time for a row: to the row, the round has not been."""

from __future__ import annotations

import pytest
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Asked, Proposal
from aioinfer.diffusion.registry import algorithm_class, algorithm_names
from tests.diffusion.cases import Denoiser, make_case


class Waiting:
    """Changes nothing, and lets some rows wait."""

    def __init__(self, waits: torch.Tensor) -> None:
        self.waits: torch.Tensor | None = waits

    def adjust(self, logits: torch.Tensor, asked: Asked, block: Block) -> None: ...

    def steer(self, logits: torch.Tensor, asked: Asked, proposal: Proposal, block: Block) -> torch.Tensor:
        return torch.ones_like(block.known)

    def written(self, block: Block) -> None: ...


@pytest.mark.parametrize("algorithm", [name for name in algorithm_names() if algorithm_class(name).steerable])
def test_a_row_that_waits_is_as_it_was_and_the_others_go_on(algorithm: str) -> None:
    for seed in range(40):
        case = make_case(algorithm, seed)
        mine, other = Denoiser.of(case), Denoiser.of(case)
        for turn in range(4):
            waits = torch.tensor([(seed + turn + row) % 2 == 0 for row in range(len(case.rows))])
            rounds = mine.block.rounds.tolist()
            logits = torch.stack([case.logits(row, rounds[row]) for row in range(len(rounds))])
            for name, column in other.block.columns().items():
                column.copy_(mine.block.columns()[name])
            for name, column in other.state.items():
                column.copy_(mine.state[name])
            before = [{name: column.clone() for name, column in mine.block.columns().items()}]
            before.append({name: column.clone() for name, column in mine.state.items()})
            mine.algorithm.step(logits.float(), mine.block, mine.state, guide=Waiting(waits))
            other.algorithm.step(logits.float(), other.block, other.state)
            for was, now, full in zip(
                before, (mine.block.columns(), mine.state), (other.block.columns(), other.state), strict=True
            ):
                for name in was:
                    if name != "changed":  # of the round before, or of none: the row is not done
                        assert torch.equal(now[name][waits], was[name][waits]), (seed, name)
                    assert torch.equal(now[name][~waits], full[name][~waits]), (seed, name)
