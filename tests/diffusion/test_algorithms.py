"""Every algorithm writes what a plain reference writes, token for token and step for step."""

from __future__ import annotations

import pytest
import torch

from aioinfer.diffusion.registry import usable_algorithms
from tests.diffusion.cases import MASK, VOCAB, Case, assert_agrees, make_case
from tests.diffusion.reference import Row
from tests.tiers import SECONDS, grid, rest, scaled

CASES = scaled(60, 12)
Patch = pytest.MonkeyPatch


@rest(SECONDS)
@pytest.mark.parametrize("algorithm", usable_algorithms((1, 2)))
def test_every_round_is_the_reference_s(algorithm: str) -> None:
    steps = [assert_agrees(make_case(algorithm, seed)) for seed in range(CASES)]
    assert len(set(steps)) > 5, "cases differ in how long they take"


@pytest.mark.parametrize("algorithm", usable_algorithms((1, 2)))
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
    """JointThreshold as it is published: a forward that changes nothing ends it, and so does the first one
    beyond the budget of edits.

    Returns the final ids, the forwards, and whether the budget ended it.
    """
    row = case.rows[0]
    for forward in range(1, 200):
        full = all(row.known)
        row.done = False
        row.step(case.logits(0, row.rounds))
        if not row.changed:
            return row.ids, forward, full and row.post_edits > row.params["max_post_edits"]
    raise AssertionError("does not end")


@rest(SECONDS)
def test_joint_threshold_commits_in_the_forward_that_finds_no_edits_left() -> None:
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
        assert ours.rows[0].rounds == forwards - spent, seed
        assert ours.rows[0].changed is False, "the reference has stepped a done row once more"
        endings.add(spent)
    assert endings == {True, False}
