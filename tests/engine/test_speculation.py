"""Drafts change the speed and nothing else: the toy device with every drafter, draft length and setting."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.llm import LLM
from aioinfer.outputs import Result
from aioinfer.params import Grammar, SamplingParams
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling import token_batch
from aioinfer.scheduling.audit import audit, check_idle
from aioinfer.scheduling.step import NewRequestData, Row
from aioinfer.speculation.drafter import Drafter
from tests.engine.laws import watch_core
from tests.sequences import sequence_of
from tests.speculation.drafters import KINDS, Guesser, name_of
from tests.tiers import grid, scaled
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

PROMPT = [3, 1, 4, 1, 5]


def toy(
    drafter: Drafter | None = None,
    *,
    device: type[ToyDevice] = ToyDevice,
    pages: int = 200,
    snapshots: int | None = None,
    **config: Any,
) -> LLM:
    """``snapshots``: the model has a recurrent state, of which so many are kept."""
    settings = {"page_size": 4, "adaptive_drafts": False, **config}
    return LLM(
        EngineConfig(model="toy", **settings),
        device=lambda config: device(
            num_pages=pages, page_size=config.page_size, num_slots=config.num_slots, snapshots=snapshots
        ),
        tokenizer=lambda _: ToyTokenizer(),
        drafter=drafter,
    )


def run(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Result | Exception]:
    """All at once, under the laws."""
    watch_core(llm._core)
    keys = [llm.add_request(*request) for request in requests]
    for key, (_, params) in zip(keys, requests, strict=True):
        drafting = sequence_of(llm._open[key]).drafting
        if drafting is not None:
            drafting.request.name = name_of(params)
    found: dict[int, Any] = {}
    while llm.has_unfinished():
        found |= llm.step()
        audit(llm._core.scheduler)
    check_idle(llm._core.scheduler)
    return [found[key] for key in keys]


def alike(one: Result, other: Result) -> None:
    """But for the times, and what was in the cache."""
    for field in dataclasses.fields(Result):
        if field.name not in ("metrics", "usage", "request_id"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert one.usage.prompt_tokens == other.usage.prompt_tokens


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    found = []
    for _ in range(rng.randrange(1, 8)):
        params = SamplingParams(
            temperature=rng.choice([0, 1]),
            seed=rng.randrange(100),
            max_tokens=rng.choice([1, 2, 3, 10, 40]),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0]),
            stop=rng.choice([(), ("a",), ("ab", "ü")]),
            stop_token_ids=rng.choice([(), (7, 9)]),
            stop_regex=rng.choice([(), ("[x-z]{2}",)]),
        )
        found.append(([rng.randrange(1, 64) for _ in range(rng.choice([1, 5, 20]))], params))
    return found


def compare(seed: int) -> None:
    """Random requests with random drafts, at any window, page, chunk and draft length, with retractions."""
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4, 8])
    config = {
        "page_size": page,
        "max_running_requests": rng.choice([1, 3, 8]),
        "overlap_steps": rng.choice([0, 1, 2]),
        "max_draft_tokens": rng.choice([1, 2, 5, 15]),
        "chunk_size": rng.choice([4, 16]),
        "max_step_tokens": rng.choice([8, 32]),
        "max_decode_rows": rng.choice([None, 2]),
        "mixed": rng.random() < 0.7,
        "prefix_cache": rng.random() < 0.7,
        "adaptive_drafts": rng.random() < 0.3,
    }
    pages = -(-rng.choice([64, 100, 400]) // page)
    requests = random_requests(rng)
    with toy(speculation="off", pages=400 // page) as plain:
        wanted = run(plain, requests)
    kind, snapshots = rng.choice(KINDS), rng.choice([None, None, 0, 3])
    with toy(Guesser(kind, rng), pages=pages, snapshots=snapshots, **config) as drafting:
        found = run(drafting, requests)
        stats = drafting.stats()
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, Result)
        assert isinstance(other, Result)
        alike(one, other)
    assert stats.rejected_tokens >= 0


@pytest.mark.parametrize("seed", range(scaled(400)))
def test_outputs_are_those_without_drafts(seed: int) -> None:
    """Ids, text, logprobs, reasons and usage."""
    compare(seed)


def test_a_state_that_lacks_right_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_batch, "_replays", lambda _: {})
    requests = [(PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))]
    with (
        pytest.raises(errors.StepFailed, match="not of its own"),
        toy(Guesser("right", random.Random(0)), snapshots=2) as llm,
    ):
        run(llm, requests)


@pytest.mark.parametrize("most", [1, 4, 15])
@pytest.mark.parametrize("count", [1, 2, 17, 40])
def test_right_drafts_take_as_few_steps_as_there_can_be(most: int, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    with toy(Guesser("right", random.Random(0)), max_draft_tokens=most, overlap_steps=0) as llm:
        (result,) = run(llm, [(PROMPT, params)])
        stats = llm.stats()
    assert isinstance(result, Result)
    assert len(result.token_ids) == count
    assert stats.steps == 1 + math.ceil((count - 1) / (most + 1))
    assert stats.rejected_tokens == 0
    assert stats.accepted_tokens + stats.verified_rows == stats.output_tokens - (
        stats.steps - stats.verified_rows
    )


# -- ends at every offset of a run ---------------------------------------------------------------------


def outputs(count: int = 30) -> list[int]:
    return toy_generate(PROMPT, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


# -- what else can end or change a run -----------------------------------------------------------------


class Broken(ToyDevice):
    """The logits of one position are not finite."""

    at = 0

    def _next(self, row: Row, state: int, tenant: NewRequestData) -> int:
        return BAD_LOGITS if row.output_index == self.at else super()._next(row, state, tenant)


@pytest.mark.parametrize("at", range(1, 9))
def test_bad_logits_at_any_offset_fail_their_request_behind_the_tokens_before(at: int) -> None:
    broken = type("Broken", (Broken,), {"at": at})
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with toy(Guesser("right", random.Random(0)), device=broken, max_draft_tokens=4) as llm:
        key = llm.add_request(PROMPT, params)
        with pytest.raises(errors.StepFailed, match="finite"):
            while llm.has_unfinished():
                llm.step()
        del key
        check_idle(llm._core.scheduler)


def test_drafts_never_cost_another_request_its_pages() -> None:
    """Where pages are short, fewer tokens are drafted."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [([number] * 4, params) for number in range(1, 5)]
    stats = []
    for drafter in (None, Guesser("wrong", random.Random(0))):
        with toy(drafter, pages=16, speculation="off", prefix_cache=False, overlap_steps=0) as llm:
            run(llm, requests)
            stats.append(llm.stats())
    assert stats[1].retractions == stats[0].retractions
    assert stats[1].verified_rows > 0


# -- grammars ------------------------------------------------------------------------------------------


def words(count: int) -> Grammar:
    # No token of the toy is a single a.
    return Grammar("regex", f"(bcd|cde|def|eeee|f){{{count}}}")


@pytest.mark.parametrize("overlap", grid([1], [0, 2]))
@pytest.mark.parametrize("kind", ["right", "random", "mixed", "lookup"])
@pytest.mark.parametrize("seed", range(scaled(10, 3)))
def test_grammars_give_the_same_with_drafts(kind: str, overlap: int, seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        (
            [rng.randrange(1, 64) for _ in range(6)],
            SamplingParams(
                temperature=rng.choice([0, 1]),
                seed=rng.randrange(9),
                max_tokens=rng.choice([7, 60]),
                grammar=words(rng.choice([3, 12])) if rng.random() < 0.8 else None,
                bad_words=[(rng.randrange(1, 64),)] if rng.random() < 0.3 else (),
                logprobs=rng.choice([None, 0]),
            ),
        )
        for _ in range(4)
    ]
    with toy(speculation="off", fast_forward=False) as plain:
        wanted = run(plain, requests)
    drafter = None if kind == "lookup" else Guesser(kind, rng)
    with toy(drafter, overlap_steps=overlap, max_draft_tokens=rng.choice([2, 8])) as llm:
        found = run(llm, requests)
        verified = llm.stats().verified_rows
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, Result)
        assert isinstance(other, Result)
        alike(one, other)
    assert verified > 0 or kind == "random"


def test_tokens_that_a_grammar_forces_are_verified_as_drafts() -> None:
    """They void nothing, and have logprobs."""
    literal = "bcdebcdebcde"
    params = SamplingParams(temperature=0, max_tokens=40, grammar=Grammar("regex", literal), logprobs=0)
    with toy(Guesser("none", random.Random(0)), overlap_steps=0) as llm:
        (result,) = run(llm, [(PROMPT, params)])
        stats = llm.stats()
    assert isinstance(result, Result)
    assert result.text == literal
    assert stats.deferred_rows == stats.rejected_tokens == 0
    assert stats.accepted_tokens > 5
    assert len(result.logprobs or ()) == len(result.token_ids)
