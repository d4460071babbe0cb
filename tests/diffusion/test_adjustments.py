"""Penalties, biases, bans, filters and logprobs of blocks, against :mod:`tests.diffusion.adjusting`."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.diffusion.state import BlockState
from aioinfer.execution.decoding.base import Guided
from aioinfer.execution.decoding.block_steering import BlockSteering
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import NewRequestData
from tests.diffusion.adjusting import adjusted, raw_logprobs
from tests.diffusion.cases import MASK, VOCAB, Case, Denoiser, make_case, seen
from tests.tiers import points, scaled

KINDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition-below-1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.9},
    "rewarded": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {2: 3.0, 3: -100, MASK: 100, 9: 0.25}},
    "allowed": {"allowed_token_ids": [1, 4, 6, MASK, 11]},
    "min": {"min_tokens": 5},
    "sigma": {"top_n_sigma": 1.3, "logit_bias": {1: 0.5}},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": {2: 3.0},
        "allowed_token_ids": [0, 1, 2, 4, 6, 11, 12],
        "min_tokens": 3,
        "top_n_sigma": 1.7,
        "logprobs": 2,
    },
    "logprobs": {"logprobs": 3},
}
STOPS = (0, 6)


@dataclass
class Asked:
    """One row: its tokens before the block, and what it asks for."""

    prompt: list[int]
    output: list[int]
    params: SamplingParams

    @property
    def data(self) -> NewRequestData:
        return NewRequestData(self.params, 0, frozenset(STOPS), self.prompt, self.output)


def asking(case: Case, options: dict[str, Any], rng: random.Random) -> list[Asked]:
    """Rows a few blocks into their sequences. Where tokens of the block are given, they end the prompt."""
    asked = []
    for row in case.rows:
        row.start = rng.randrange(4) * row.size
        tokens = rng.choices(range(VOCAB), k=row.start)
        cut = len(tokens) if row.given else rng.randint(0, len(tokens))
        sampling = {**row.sampling, "logprobs": 0, **options}
        asked.append(Asked([*tokens[:cut], *row.given], tokens[cut:], SamplingParams(**sampling)))
    return asked


def untied(case: Case, number: int, round: int) -> torch.Tensor:
    """Logits of a row, no two of them equal: sums of what is equal depend on the order."""
    logits = case.logits(number, round).float()
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(64 * number + round))
    return logits + noise / 64


def step_as_written_down(case: Case, number: int, asked: Asked, tops: dict[int, Any]) -> None:
    """A round of the reference, from adjusted logits; logprobs are those of the model."""
    row, logits = case.rows[number], untied(case, number, case.rows[number].rounds)
    known = [
        token if there and at >= len(row.given) else None
        for at, (token, there) in enumerate(zip(row.ids, row.known, strict=True))
    ]
    ids = list(row.ids)
    lines = adjusted(
        *(logits, asked.params),
        mask_id=MASK,
        prompt=asked.prompt,
        before=asked.output,
        block=known,
        start=row.start,
        stop_ids=STOPS,
    )
    row.step(lines)
    for at in range(row.size):
        if row.changed and row.written_in[at] == row.rounds - 1:
            penalty = row.params.get("penalty")
            lowered = (ids[at - 1], penalty) if penalty and at else None
            found = raw_logprobs(logits[at], MASK, lowered)
            row.logprobs[at] = found[row.ids[at]]
            tops[at] = found


def check_tops(told: Guided, tops: dict[int, list[float]], count: int) -> None:
    for at, top in enumerate(told.tops):
        if at not in tops:
            assert top == ()
            continue
        likeliest = [value for value in sorted(tops[at], reverse=True)[:count] if value > -1e30]
        assert [value for _, value in top] == pytest.approx(likeliest, abs=1e-4)
        assert all(tops[at][token] == pytest.approx(value, abs=1e-4) for token, value in top)
        assert len({token for token, _ in top}) == len(top)


ALGORITHMS = usable_algorithms(None)
PAIRS = list(itertools.product(KINDS, ALGORITHMS))
#: every kind with some algorithm
SOME = list(zip(KINDS, itertools.cycle(ALGORITHMS), strict=False))


@pytest.mark.parametrize(("kind", "algorithm"), points(SOME, [pair for pair in PAIRS if pair not in SOME]))
def test_rounds_are_those_of_the_plain_definition(kind: str, algorithm: str) -> None:
    """Token for token; the logprobs are the model's own, whatever was changed."""
    options = KINDS[kind]
    for seed in range(scaled(16, 3)):
        case = make_case(algorithm, seed)
        asked = asking(case, options, random.Random(seed))
        denoiser = Denoiser.of(case)
        steering = BlockSteering(case.size, GrammarWorker(threaded=False))
        for slot, each in enumerate(asked):
            steering.admit(slot, each.data)
        denoiser.block.starts.copy_(torch.tensor([row.start for row in case.rows]))
        tops: list[dict[int, Any]] = [{} for _ in case.rows]
        for _ in range(case.size + 19):
            if all(row.done for row in case.rows):
                break
            rounds = denoiser.block.rounds.tolist()
            logits = torch.stack([untied(case, row, rounds[row]) for row in range(len(rounds))])
            for number, each in enumerate(asked):
                if not case.rows[number].done:
                    step_as_written_down(case, number, each, tops[number])
            guide = steering.guide(range(len(asked)), alone=True)
            denoiser.algorithm.step(logits, denoiser.block, denoiser.state, guide=guide)
            for number, (row, told) in enumerate(zip(case.rows, guide.told(), strict=True)):
                found = seen(denoiser.block, number)
                wanted = {name: getattr(row, name) for name in found if name != "changed"}
                found.pop("changed")
                assert found == wanted, (seed, number, row.params, row.sampling)
                torch.testing.assert_close(
                    denoiser.block.logprobs[number], torch.tensor(row.logprobs), rtol=1e-4, atol=1e-4
                )
                check_tops(told, tops[number] if options.get("logprobs") else {}, options.get("logprobs", 0))


def step_once(params: SamplingParams, logits: torch.Tensor, **data: Any) -> tuple[list[int], bool, bool]:
    """Ids after a round over one block of 4 masks, whether it failed, and whether nothing was allowed."""
    steering = BlockSteering(4, GrammarWorker(threaded=False))
    begun = {"prompt_ids": [], "output_ids": [], **data}
    steering.admit(1, NewRequestData(params, 0, frozenset(STOPS), **begun))
    case = make_case("low_confidence", 0)
    case.rows = [case.rows[0]]
    case.rows[0].given, case.rows[0].size, case.rows[0].start, case.size = [], 4, 0, 4
    case.rows[0].params = {"threshold": 0.0}
    case.rows[0].sampling = {"temperature": 0.0, "seed": 0}
    denoiser = Denoiser.of(case)
    guide = steering.guide([1], alone=True)
    denoiser.algorithm.step(logits.clone().unsqueeze(0), denoiser.block, denoiser.state, guide=guide)
    return denoiser.block.ids[0].tolist(), bool(denoiser.block.failed), guide.told()[0].exhausted


def test_tokens_of_one_round_do_not_see_each_other() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 3], logits[:, 4] = 2.0, 1.5
    ids, _, _ = step_once(SamplingParams(temperature=0, presence_penalty=1.0), logits)
    assert ids == [3, 3, 3, 3]


def test_where_no_token_is_allowed_the_constraint_is_blamed_and_not_the_model() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[2, 3] = -torch.inf
    ids, failed, exhausted = step_once(SamplingParams(temperature=0, allowed_token_ids=[3]), logits)
    assert (ids, failed, exhausted) == ([MASK] * 4, True, True)
    logits[2, 3] = torch.nan
    ids, failed, exhausted = step_once(SamplingParams(temperature=0, allowed_token_ids=[3]), logits)
    assert (ids, failed, exhausted) == ([MASK] * 4, True, False)


def test_the_alternatives_of_a_block_go_on_from_where_it_was_left() -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    begun = BlockState(0, [5, MASK], [True, False], [0, -1], [-1.0, 0.0], 1, False, True, False)
    begun = BlockState(
        **{name: getattr(begun, name) for name in begun.__slots__} | {"tops": [((5, -1.0),), ()]}
    )
    steering = BlockSteering(2, GrammarWorker(threaded=False))
    steering.admit(1, NewRequestData(params, 0, frozenset(), [], [], resume=begun))
    assert steering.guide([1], alone=True).told() == [Guided([((5, -1.0),), ()], exhausted=False)]
