"""Scripted logits make blocks take the rounds they say."""

from __future__ import annotations

import pytest
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.diffusion.scripted import ScriptedLogits
from aioinfer.params import DiffusionParams, SamplingParams

VOCAB, MASK = 64, 9


def begin(count: int, size: int) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """Blocks with 0 to ``size`` - 1 positions given, their requests and numbers."""
    given = [[MASK] * (row % size) for row in range(count)]
    block = Block.begin(given, [0] * count, size=size, mask_id=MASK)
    return block, torch.arange(count) // 3, torch.arange(count) % 3


def run(algorithm: str, script: ScriptedLogits, block: Block, *where: torch.Tensor) -> None:
    cls, count = algorithm_class(algorithm), len(block.ids)
    params = DiffusionParams(algorithm=algorithm)
    state = cls.init_state([params] * count, [SamplingParams(temperature=0)] * count, [0] * count)
    while not block.done.all():
        logits = script.logits(*where, block.editable, block.rounds)
        assert (logits.argmax(2) == MASK).all()
        cls(MASK).step(logits, block, state)


@pytest.mark.parametrize("size", [4, 32])
def test_blocks_take_the_rounds_that_are_scripted(size: int) -> None:
    script = ScriptedLogits(VOCAB, MASK, seed=2)
    block, *where = begin(60, size)
    run("low_confidence", script, block, *where)
    assert block.rounds.tolist() == script.steps(*where, block.editable).tolist()
    final = script.tokens(*where, block.editable, block.rounds)
    assert torch.equal(block.ids[block.editable], final[block.editable])


def test_edits_come_one_by_one_after_a_block_is_full() -> None:
    script = ScriptedLogits(VOCAB, MASK, edits=4)
    block, *where = begin(60, 16)
    edits = script.edits(*where, block.editable)
    assert set(edits.tolist()) == {0, 1, 2, 3, 4}
    draft = script.tokens(*where, block.editable, torch.zeros_like(block.rounds))
    run("joint_threshold", script, block, *where)
    assert block.rounds.tolist() == (script.steps(*where, block.editable) + edits + 1).tolist()
    assert (((block.ids != draft) & block.editable).sum(1) == edits).all()


def test_steps_vary_as_told() -> None:
    """Log-normal with mean 8 and variation 0.6, where blocks are long enough not to cut it off."""
    requests = torch.arange(4000)
    editable = torch.ones(4000, 256, dtype=torch.bool)
    steps = ScriptedLogits(VOCAB, MASK, seed=1).steps(requests, requests * 0, editable).double()
    assert steps.mean().item() == pytest.approx(8, rel=0.03)
    assert (steps.std() / steps.mean()).item() == pytest.approx(0.6, rel=0.06)
    even = ScriptedLogits(VOCAB, MASK, mean_steps=5, variation=0).steps(requests, requests * 0, editable)
    assert (even == 5).all()


def test_a_script_depends_on_seed_request_block_and_round_alone() -> None:
    block, *where = begin(12, 8)
    everything = ScriptedLogits(VOCAB, MASK, seed=5).logits(*where, block.editable, torch.arange(12) % 4)
    for row in range(12):
        one = slice(row, row + 1)
        part = [column[one] for column in where]
        logits = ScriptedLogits(VOCAB, MASK, seed=5).logits(
            *part, block.editable[one], torch.tensor([row % 4])
        )
        assert torch.equal(logits[0], everything[row])
    other = ScriptedLogits(VOCAB, MASK, seed=6).logits(*where, block.editable, torch.arange(12) % 4)
    assert not torch.equal(other, everything)
    assert not torch.equal(everything[0], everything[8]), "of another request"


def test_a_vocabulary_too_small_for_doubt_is_refused() -> None:
    with pytest.raises(ValueError, match="15"):
        ScriptedLogits(15, MASK)
