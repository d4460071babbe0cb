"""Every algorithm writes what a plain reference writes, token for token and step for step, and planted bugs
are found that way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from aioinfer.diffusion import algorithm as algorithm_module
from aioinfer.diffusion import proposal as proposal_module
from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.algorithms.factor import Factor
from aioinfer.diffusion.algorithms.joint_threshold import JointThreshold
from aioinfer.diffusion.algorithms.low_confidence import LowConfidence
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Asked, Proposal, Propose
from aioinfer.diffusion.registry import algorithm_names
from aioinfer.diffusion.rows import Rows
from tests.diffusion.cases import MASK, VOCAB, Case, assert_agrees, make_case
from tests.diffusion.reference import Row
from tests.tiers import PLANTED_BUG, SECONDS, grid, nightly, rest, scaled

CASES = scaled(60)
Patch = pytest.MonkeyPatch


@rest(SECONDS)
@pytest.mark.parametrize("algorithm", algorithm_names())
def test_every_round_is_the_reference_s(algorithm: str) -> None:
    steps = [assert_agrees(make_case(algorithm, seed)) for seed in range(CASES)]
    assert len(set(steps)) > 5, "cases differ in how long they take"


@pytest.mark.parametrize("algorithm", algorithm_names())
@pytest.mark.parametrize("size", grid([4], [8, 32]))
def test_any_part_of_a_block_may_be_given(algorithm: str, size: int) -> None:
    """Prompt tails of every length, which spell the mask id, side by side."""
    sampling = {"temperature": 0.5, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
    rows = [
        Row(
            algorithm, [MASK, 3] * (tail // 2) + [MASK] * (tail % 2), size, MASK, size, {"steps": 4}, sampling
        )
        for tail in range(size + 1)
    ]
    for tail, row in enumerate(rows):
        row.sampling = {**sampling, "seed": tail}
    assert_agrees(Case(algorithm, size, torch.float32, rows, list(range(4000, 4001 + size))))
    assert [row.ids[:tail] for tail, row in enumerate(rows)] == [row.given for row in rows]


def exact_case(algorithm: str, kept: list[int], params: dict[str, float]) -> Case:
    """One greedy row; position i proposes one of ``kept[i]`` equally likely tokens, 1 / kept[i] each."""

    class Exact(Case):
        def logits(self, row: int, round: int) -> torch.Tensor:
            logits = torch.full((len(kept), VOCAB), float("-inf"))
            for at, count in enumerate(kept):
                logits[at, MASK + 1 - count : MASK + 1] = 1.0
                logits[at, MASK + 1] = 1.0
            return logits

    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1}
    row = Row(algorithm, [], len(kept), MASK, 0, params, sampling)
    return Exact(algorithm, len(kept), torch.float32, [row], [0])


#: algorithm, tokens that are equally likely at each position, parameters, where is written in which round
EDGES = {
    "a threshold that is met is not passed": (
        ("low_confidence", [2, 3, 2, 4], {"threshold": 0.5}),
        [0, 2, 1, 3],
    ),
    "one above the threshold": (("low_confidence", [1, 2, 1, 4], {"threshold": 0.5}), [0, 1, 0, 2]),
    "a budget reveals what confidence would not": (
        ("low_confidence", [2, 2, 2, 2, 2], {"threshold": 1.0, "steps": 3}),
        [0, 0, 1, 1, 2],
    ),
    "a factor that is met is enough": (("factor", [2, 2, 4, 4], {"factor": 1.5}), [0, 0, 1, 2]),
    "an entropy that is met is enough": (
        ("entropy_bound", [1, 1, 4, 4], {"entropy_bound": 0.0}),
        [0, 0, 0, 1],
    ),
    "steps that do not divide": (("static_steps", [4, 3, 2, 1, 4], {"steps": 2}), [1, 0, 0, 0, 1]),
    "an edit threshold that is met is not passed": (
        ("joint_threshold", [2, 4, 4, 4], {"threshold": 0.5, "edit_threshold": 0.25}),
        [0, 1, 2, 3],
    ),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_thresholds(edge: str) -> None:
    case, written = exact_case(*EDGES[edge][0]), EDGES[edge][1]
    assert_agrees(case)
    assert case.rows[0].written_in == written


def literal_joint(case: Case) -> tuple[list[int], int, bool]:
    """JointThreshold as it was published: done is reported by the forward after the one that ends the edits.

    Returns the final ids, the forwards, and whether the budget of edits ended it.
    """
    row = case.rows[0]
    finished = spent = False
    for forward in range(200):
        if finished:
            return row.ids, forward + 1, spent
        full = all(row.known)
        row.done = False
        row.step(case.logits(0, row.rounds))
        finished = not row.changed
        spent = full and row.post_edits > row.params["max_post_edits"]
    raise AssertionError("does not end")


@rest(SECONDS)
def test_joint_threshold_saves_the_forwards_that_change_nothing() -> None:
    endings = set()
    for seed in range(scaled(120)):
        case = make_case("joint_threshold", seed)
        case = case.only([0])
        case.rows[0].params["max_post_edits"] = seed % 3
        ours = case.only([0])
        assert_agrees(ours)
        if ours.rows[0].failed or ours.rows[0].rounds == 0:
            continue
        ids, forwards, spent = literal_joint(case)
        if case.rows[0].failed:
            continue
        assert ours.rows[0].ids == ids, seed
        assert ours.rows[0].rounds == forwards - (2 if spent else 1), seed
        assert ours.rows[0].changed is False, "the reference has stepped a done row once more"
        endings.add(spent)
    assert endings == {True, False}


# -- planted bugs --------------------------------------------------------------------------------------


def met_is_passed(patch: Patch) -> None:
    def choose(self: LowConfidence, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        sure = proposal.confidence >= state["threshold"].unsqueeze(1)
        return sure | (ranks(proposal.confidence, block.masked) < self.quota(block, state))

    patch.setattr(LowConfidence, "choose", choose)


def met_is_not_passed(patch: Patch) -> None:
    def choose(self: Factor, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        rank = ranks(proposal.confidence, block.masked)
        asked = 1 - state["factor"].unsqueeze(1) / (rank + 2)
        return (proposal.confidence > asked) | (rank < self.quota(block, state))

    patch.setattr(Factor, "choose", choose)


def altered_state(change: Callable[[Rows], None]) -> Callable[[Patch], None]:
    """Every step sees a state that is changed before."""

    def plant(patch: Patch) -> None:
        step = Algorithm.step

        def wrong(self: Algorithm, logits: torch.Tensor, block: Block, state: Rows) -> torch.Tensor:
            changed = {name: column.clone() for name, column in state.items()}
            change(changed)
            for name in self.counters:
                changed[name] = state[name]
            return step(self, logits, block, changed)

        patch.setattr(Algorithm, "step", wrong)

    return plant


def one_more(name: str) -> Callable[[Patch], None]:
    def change(state: Rows) -> None:
        state[name] += state[name] > 0 if name == "steps" else 1

    return altered_state(change)


def ignored(name: str, value: float) -> Callable[[Patch], None]:
    return altered_state(lambda state: state.update({name: torch.full_like(state[name], value)}))


def altered_block(change: Callable[[Block], None]) -> Callable[[Patch], None]:
    """Every step begins with a block that is changed."""

    def plant(patch: Patch) -> None:
        step = Algorithm.step

        def wrong(self: Algorithm, logits: torch.Tensor, block: Block, state: Rows) -> torch.Tensor:
            change(block)
            return step(self, logits, block, state)

        patch.setattr(Algorithm, "step", wrong)

    return plant


def mask_by_id(patch: Patch) -> None:
    patch.setattr(Block, "masked", property(lambda block: block.ids == MASK))


def known_by_id(patch: Patch) -> None:
    altered_block(lambda block: block.known.copy_(block.ids != MASK))(patch)


def prompt_is_edited(patch: Patch) -> None:
    altered_block(lambda block: block.editable.fill_(True))(patch)


def mask_is_sampled(patch: Patch) -> None:
    init = Algorithm.__init__

    def wrong(self: Algorithm, mask_id: int, propose: Propose | None = None) -> None:
        init(self, VOCAB - 1 if mask_id == MASK else MASK, propose)

    patch.setattr(Algorithm, "__init__", wrong)


def one_noise_for_all_rounds(patch: Patch) -> None:
    patch.setattr(proposal_module, "_ROUND_SHIFT", 64)
    propose = proposal_module.propose

    def wrong(logits: torch.Tensor, asked: Asked) -> Proposal:
        return propose(logits, replace(asked, rounds=torch.zeros_like(asked.rounds)))

    patch.setattr(algorithm_module, "propose", wrong)


def altered_proposal(change: Callable[[Proposal], None]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        propose = proposal_module.propose

        def wrong(logits: torch.Tensor, asked: Asked) -> Proposal:
            proposal = propose(logits, asked)
            change(proposal)
            return proposal

        patch.setattr(algorithm_module, "propose", wrong)

    return plant


def done_rows_go_on(patch: Patch) -> None:
    altered_block(lambda block: block.done.fill_(False))(patch)


def edits_without_end(patch: Patch) -> None:
    patch.setattr(JointThreshold, "finished", lambda self, block, state: ~block.changed)


def one_edit_less(patch: Patch) -> None:
    def finished(self: JointThreshold, block: Block, state: Rows) -> torch.Tensor:
        spent = state["post_edits"] + 1 >= state["max_post_edits"]
        return ~block.changed | (~block.masked.any(1) & spent)

    patch.setattr(JointThreshold, "finished", finished)


def penalty_at_its_own_position(patch: Patch) -> None:
    patch.setattr(JointThreshold, "lowered", lambda self, block, state: (block.ids, state["penalty"]))


def ties_from_the_right(patch: Patch) -> None:
    precedes = algorithm_module.precedes

    def wrong(score: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        return precedes(score.flip(1), among.flip(1)).flip(1, 2)

    patch.setattr(algorithm_module, "precedes", wrong)


def half_precision(patch: Patch) -> None:
    propose = proposal_module.propose

    def wrong(logits: torch.Tensor, asked: Asked) -> Proposal:
        return propose(logits.to(torch.bfloat16), asked)

    patch.setattr(algorithm_module, "propose", wrong)


#: name -> where it must show, and how it is planted
PLANTED: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "threshold met is passed": ("low_confidence", met_is_passed),
    "factor met is not passed": ("factor", met_is_not_passed),
    "a step more than the budget": ("low_confidence", one_more("steps")),
    "a step more than were asked for": ("static_steps", one_more("steps")),
    "a post edit too many": ("joint_threshold", one_more("max_post_edits")),
    "a post edit too few": ("joint_threshold", one_edit_less),
    "post edits without end": ("joint_threshold", edits_without_end),
    "penalty ignored": ("joint_threshold", ignored("penalty", 0.0)),
    "penalty at its own position": ("joint_threshold", penalty_at_its_own_position),
    "edit threshold ignored": ("joint_threshold", ignored("edit_threshold", 0.0)),
    "entropy bound ignored": ("entropy_bound", ignored("entropy_bound", 0.15)),
    "seed ignored": ("low_confidence", ignored("seed", 1)),
    "top-p ignored": ("low_confidence", ignored("top_p", 1.0)),
    "mask id sampled": ("low_confidence", mask_is_sampled),
    "mask id sampled by an edit": ("joint_threshold", mask_is_sampled),
    "prompt edited": ("joint_threshold", prompt_is_edited),
    "what is masked decided by ids": ("low_confidence", mask_by_id),
    "what is masked decided by ids, edits": ("joint_threshold", mask_by_id),
    "what is known decided by ids": ("joint_threshold", known_by_id),
    "one noise for all rounds": ("low_confidence", one_noise_for_all_rounds),
    "confidence of the likeliest": (
        "low_confidence",
        altered_proposal(lambda proposal: proposal.confidence.copy_(1 / proposal.mass)),
    ),
    "broken logits accepted": (
        "static_steps",
        altered_proposal(lambda proposal: proposal.valid.fill_(True)),
    ),
    "done rows go on": ("joint_threshold", done_rows_go_on),
    "ties from the right": ("static_steps", ties_from_the_right),
    "half precision": ("low_confidence", half_precision),
}


@nightly(PLANTED_BUG)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug: str, monkeypatch: Patch) -> None:
    algorithm, plant = PLANTED[bug]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(CASES):
            assert_agrees(make_case(algorithm, seed))
