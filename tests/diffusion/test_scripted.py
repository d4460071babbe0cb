"""Scripted logits make blocks take the rounds they say."""

from __future__ import annotations

import pytest
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.diffusion.scripted import ScriptedLogits
from aioinfer.params import DiffusionParams, SamplingParams
from tests.diffusion.cases import take_blocks
from tests.tiers import SECONDS, rest

VOCAB, MASK = 64, 9


def begin(count: int, size: int) -> tuple[Block, torch.Tensor]:
    """Blocks with 0 to ``size`` - 1 positions given, and what comes before them."""
    given = [list(range(10, 10 + row % size)) for row in range(count)]
    return Block.begin(given, [0] * count, size=size, mask_id=MASK), torch.arange(count) * 7919


def run(algorithm: str, script: ScriptedLogits, block: Block, before: torch.Tensor) -> None:
    cls, count = algorithm_class(algorithm), len(block.ids)
    params = DiffusionParams(algorithm=algorithm)
    state = cls.init_state([params] * count, [SamplingParams(temperature=0)] * count, [0] * count)
    while not block.done.all():
        logits = script.logits(before, block.ids)
        assert (logits.argmax(2) == MASK).all()
        cls(MASK).step(logits, block, state)


@pytest.mark.parametrize("size", [4, 5, 32])
def test_blocks_take_the_rounds_that_are_scripted(size: int) -> None:
    script = ScriptedLogits(VOCAB, MASK, seed=2)
    block, before = begin(60, size)
    wanted = script.steps(before, block.masked.sum(1), size)
    run("low_confidence", script, block, before)
    assert block.rounds.tolist() == wanted.tolist()
    assert len(set(wanted.tolist())) >= min(size, 4)
    assert (script.steps(before, torch.zeros_like(before), size) == 0).all()


def test_what_is_sure_is_what_the_logits_are_sure_of() -> None:
    script = ScriptedLogits(VOCAB, MASK, seed=3)
    block, before = begin(60, 8)
    tokens, sure = script.sure(before, block.ids)
    logits = script.logits(before, block.ids)
    logits[..., MASK] = -torch.inf
    likeliest = logits.softmax(2).max(2)
    assert torch.equal(tokens, likeliest.indices)
    assert torch.equal(sure, likeliest.values > 0.5)
    assert 0 < sure[block.masked].sum() < block.masked.sum()


@rest(SECONDS)
def test_edits_come_one_by_one_after_a_block_is_full() -> None:
    script = ScriptedLogits(VOCAB, MASK, edits=4)
    block, before = begin(60, 16)
    block = take_blocks(block, torch.arange(0, 60, 16).repeat(15))
    wanted, edits = script.steps(before, block.masked.sum(1), 16), script.edits(before, 16)
    assert set(edits.tolist()) == {0, 1, 2, 3, 4}
    run("joint_threshold", script, block, before)
    assert block.rounds.tolist() == (wanted + edits + 1).tolist()
    revised = block.written_in >= wanted.unsqueeze(1)
    assert revised.sum(1).tolist() == edits.tolist()


@rest(SECONDS)
def test_steps_vary_as_told() -> None:
    """Log-normal with mean 8 and variation 0.6, where blocks are long enough not to cut it off."""
    before, all_of_it = torch.arange(4000), torch.full((4000,), 256)
    steps = ScriptedLogits(VOCAB, MASK, seed=1).steps(before, all_of_it, 256).double()
    assert steps.mean().item() == pytest.approx(8, rel=0.03)
    assert (steps.std() / steps.mean()).item() == pytest.approx(0.6, rel=0.06)
    even = ScriptedLogits(VOCAB, MASK, mean_steps=5, variation=0).steps(before, all_of_it, 256)
    assert (even == 5).all()


def test_a_script_depends_on_what_comes_before_and_in_the_block_alone() -> None:
    block, before = begin(12, 8)
    script = ScriptedLogits(VOCAB, MASK, seed=5)
    everything = script.logits(before, block.ids)
    for row in range(12):
        one = slice(row, row + 1)
        assert torch.equal(script.logits(before[one], block.ids[one])[0], everything[row])
    assert not torch.equal(ScriptedLogits(VOCAB, MASK, seed=6).logits(before, block.ids), everything)
    assert not torch.equal(everything[0], everything[8]), "behind something else"
    changed = block.ids.clone()
    changed[:, 0] += 1
    unresolved = block.ids[1:7] == MASK
    says = [script.logits(before, ids)[1:7].topk(2, 2).indices[..., 1] for ids in (block.ids, changed)]
    assert (says[0] != says[1])[unresolved].float().mean() > 0.9, "of other ids"


def test_hashes_tell_sequences_apart() -> None:
    script = ScriptedLogits(VOCAB, MASK)
    ids = torch.randint(0, VOCAB, (500, 8), generator=torch.Generator().manual_seed(1))
    swapped = ids.flip(1)
    digests = torch.cat((script.digest(ids), script.digest(swapped), script.digest(ids + 1)))
    assert len(set(digests.tolist())) == 1500
    zero = torch.zeros(500, dtype=torch.int64)
    one_way = script.chain(script.chain(zero, digests[:500]), digests[500:1000])
    other_way = script.chain(script.chain(zero, digests[500:1000]), digests[:500])
    assert len(set(one_way.tolist() + other_way.tolist())) == 1000


def test_a_vocabulary_too_small_for_doubt_is_refused() -> None:
    with pytest.raises(ValueError, match="15"):
        ScriptedLogits(15, MASK)
