"""Tokens that a grammar forces are taken without computing them; rows whose masks are late come again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.grammar_worker import GrammarRow, GrammarWorker
from aioinfer.params import Grammar, SamplingParams
from aioinfer.sampling.outcomes import BAD_GRAMMAR, DEFERRED
from aioinfer.text.grammar import GrammarState
from tests.engine.asking import SCHEMA
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_transparency import retract_every
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyDevice

PROMPT = [{"role": "user", "content": "Answer in JSON."}]


async def outputs(params: Sequence[SamplingParams], *, retract: int = 0, **config: Any) -> Any:
    """Token ids and texts of all, run together, and the statistics of the engine."""
    async with Engine(EngineConfig(threads=1, dtype="float32", speculation="off", **config)) as engine:
        retract_every(engine, retract)
        results = await asyncio.gather(*[engine.generate(PROMPT, each) for each in params])
        for result in results:
            assert result.metrics is not None
            assert len(result.metrics.token_times) == len(result.token_ids)
            assert result.usage.completion_tokens == len(result.token_ids)
        stats = engine.stats()
        await settle(engine)
    return [(result.token_ids, result.text, result.finish_reason) for result in results], stats


def params(**fields: Any) -> list[SamplingParams]:
    """Three with a grammar at different temperatures, one without."""
    bound = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=120, grammar=SCHEMA, **fields)
        for seed, temperature in enumerate((0.0, 0.8, 1.5))
    ]
    return [*bound, SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, **fields)]


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_fast_forward_saves_steps_and_changes_nothing(window: Any) -> None:
    plain, before = await outputs(params(), overlap_steps=window, fast_forward=False)
    quick, after = await outputs(params(), overlap_steps=window)
    assert quick == plain
    assert before.forced_tokens == 0
    assert after.forced_tokens > 10
    assert after.steps < before.steps
    retracted, stats = await outputs(params(), overlap_steps=window, retract=4)
    assert stats.retractions > 0
    assert retracted == plain


@rest(SECONDS)
@pytest.mark.parametrize(
    "choices", grid([["nothing of the kind", "all of that kind"]], [["nothing of the kind"]])
)
async def test_a_dead_end_behind_forced_tokens_is_not_reached_before_them(choices: list[str]) -> None:
    async def outcome(max_tokens: int, **config: Any) -> Any:
        async with Engine(EngineConfig(threads=1, dtype="float32", speculation="off", **config)) as engine:
            assert engine.tokenizer is not None
            spelled = [engine.tokenizer.decode([token]) for token in range(engine.info.vocab_size)]
            dead_end = [[token] for token, text in enumerate(spelled) if text.strip().startswith("k")]
            params = SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                grammar=Grammar("choice", json.dumps(choices)),
                bad_words=dead_end,
            )
            try:
                return (await engine.generate(PROMPT, params)).text
            except errors.ConstraintFailed as error:
                return str(error)

    for max_tokens in (6, 60):
        plain = await outcome(max_tokens, fast_forward=False)
        assert ("no token is allowed" in plain) == (max_tokens == 60)
        for window in (0, 1, 2):
            assert await outcome(max_tokens, overlap_steps=window) == plain


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_no_patience_changes_nothing(window: Any) -> None:
    plain, _ = await outputs(params(), overlap_steps=window)
    hasty, _ = await outputs(params(), overlap_steps=window, grammar_patience=0.0)
    assert hasty == plain
    hasty, stats = await outputs(params(), overlap_steps=window, grammar_patience=0.0, retract=5)
    assert stats.retractions > 0
    assert hasty == plain


@rest(SECONDS)
async def test_what_is_not_sampled_has_no_logprob_so_all_is_sampled_where_they_are_wanted() -> None:
    plain, _ = await outputs(params())
    async with Engine(EngineConfig(threads=1, dtype="float32", speculation="off")) as engine:
        results = await asyncio.gather(*[engine.generate(PROMPT, each) for each in params(logprobs=1)])
        assert engine.stats().forced_tokens == 0
    for result, (ids, _, _) in zip(results, plain, strict=True):
        assert result.token_ids == ids
        assert result.logprobs is not None
        assert [logprob.token_id for logprob in result.logprobs] == ids


@rest(SECONDS)
async def test_an_end_within_forced_tokens_ends_the_output_there() -> None:
    stops = ("_colour", '"favourite')
    asked = [each for stop in stops for each in params(stop=stop)[:3]]
    lengths = range(1, 12)
    asked += [SamplingParams(temperature=0, max_tokens=most, grammar=SCHEMA) for most in lengths]
    plain, _ = await outputs(asked, fast_forward=False)
    quick, stats = await outputs(asked)
    assert quick == plain
    assert stats.forced_tokens > 0
    for at, (_, text, reason) in enumerate(quick[:6]):
        assert reason == "stop"
        assert stops[at // 3] not in text
        assert '{"favourite_colour"'.startswith("".join(text.split()))
    assert [(len(ids), reason) for ids, _, reason in quick[6:]] == [(most, "length") for most in lengths]


@pytest.mark.parametrize("snapshots", [0, 8])
async def test_forced_tokens_are_sampled_where_a_rewind_would_begin_anew(
    make_engine: MakeEngine, snapshots: int
) -> None:
    """A recurrent state cannot be taken back."""
    bound = SamplingParams(temperature=0, grammar=Grammar("regex", "[d-h]vwxyzvwxyzvwxyz"), max_tokens=30)
    device = ToyDevice(snapshots=snapshots)
    async with make_engine(device=device, page_size=4, state_snapshot_tokens=1, speculation="off") as engine:
        result = await engine.generate(list(range(1, 33)), bound)
        assert result.text[1:] == "vwxyzvwxyzvwxyz"
        assert (engine.stats().forced_tokens > 0) == (snapshots > 0)
        await settle(engine)


class Hanging:
    """Wraps a matcher: the third token is not accepted before it is let."""

    def __init__(self, matcher: Any, go_on: threading.Event) -> None:
        self._matcher = matcher
        self._go_on = go_on
        self._left = 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def accept(self, token: int) -> bool:
        self._left -= 1
        if not self._left:
            self._go_on.wait()
        return bool(self._matcher.accept(token))


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_a_grammar_that_hangs_delays_only_its_own_rows(window: Any) -> None:
    go_on = threading.Event()
    async with Engine(
        EngineConfig(threads=1, overlap_steps=window, grammar_patience=0.001, speculation="off")
    ) as engine:
        core = engine._core
        bound = SamplingParams(temperature=1.0, seed=1, max_tokens=12, grammar=Grammar("regex", "[a-z]+"))
        free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        alone = await engine.generate("Hello", bound)
        expected = await engine.generate("Others", free)
        also = await engine.generate("Also", bound)
        compiler = core.preparing._compiler
        assert compiler is not None
        matcher = compiler.matcher

        def hang(grammar: Grammar) -> Hanging:
            return Hanging(matcher(grammar), go_on)

        compiler.matcher = hang  # type: ignore[method-assign]
        try:
            stuck = engine.generate("Hello", bound)
            for _ in range(2):
                await anext(stuck)
            compiler.matcher = matcher  # type: ignore[method-assign]
            # Others come and go, with and without grammars, while this one stands still.
            for _ in range(3):
                assert (await engine.generate("Others", free)).token_ids == expected.token_ids
                assert (await engine.generate("Also", bound)).token_ids == also.token_ids
            assert engine.stats().deferred_rows > 0
        finally:
            go_on.set()
        assert (await stuck).token_ids == alone.token_ids
        await settle(engine)


class FakeBackend:
    """Allows every token."""

    def fill(self, matchers: Sequence[Any], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        for mask in masks:
            mask[:] = 6


class FakeMatcher:
    error = None
    stopped = False

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.arrived = threading.Event()

    def accept(self, token: int) -> bool:
        self.arrived.set()
        self.hold.wait()
        self.accepted.append(token)
        return token < 90

    def forced(self) -> list[int]:
        return []

    def copy(self) -> FakeMatcher:
        return type(self)()


def state_of(matcher: FakeMatcher, position: int) -> GrammarState:
    state = GrammarState(FakeBackend(), matcher, position, 40, 0)  # type: ignore[arg-type]
    state.mask[:] = 6
    return state


def test_a_token_that_is_not_allowed_fails_its_own_row() -> None:
    masks = GrammarWorker(threaded=False)
    states = [state_of(FakeMatcher(), 5), state_of(FakeMatcher(), 5)]
    masks.advance([GrammarRow(at, state, 5, known=False) for at, state in enumerate(states)], [95, 2])
    rows = [GrammarRow(at, state, 6, known=False) for at, state in enumerate(states)]
    assert masks.collect(rows, 2).outcomes == {0: BAD_GRAMMAR}


def test_who_shares_a_turn_with_a_stuck_grammar_gets_its_mask() -> None:
    """Both before and after it: what a thread is not stuck in is taken away from it."""
    masks = GrammarWorker(0.001)
    matchers = [FakeMatcher(), FakeMatcher(), FakeMatcher()]
    states = [state_of(matcher, 5) for matcher in matchers]
    stuck = matchers[1]
    stuck.hold.clear()
    masks.advance([GrammarRow(at, state, 5, known=False) for at, state in enumerate(states)], [1, 1, 1])
    assert stuck.arrived.wait(60)
    rows = [GrammarRow(at, state, 6, known=False) for at, state in enumerate(states)]
    assert masks.collect(rows, 4).outcomes[1] == DEFERRED
    with masks._changed:
        assert masks._changed.wait_for(lambda: not (states[0].at_work or states[2].at_work), 60)
    assert states[1].at_work
    stuck.hold.set()
    with masks._changed:
        assert masks._changed.wait_for(lambda: not states[1].at_work, 60)
    assert [matcher.accepted for matcher in matchers] == [[1]] * 3
    assert [state.position for state in states] == [6] * 3
    masks.close()


def test_a_grammar_that_panics_fails_its_own_row_and_no_thread() -> None:
    class Panic(BaseException):
        """As libraries in Rust raise them."""

    class Panicking(FakeMatcher):
        def accept(self, token: int) -> bool:
            raise Panic

    class PanickingBackend(FakeBackend):
        def fill(self, matchers: Sequence[Any], masks: Sequence[npt.NDArray[np.int32]]) -> None:
            raise Panic

    masks = GrammarWorker(3600.0)
    states = [state_of(FakeMatcher(), 5), state_of(Panicking(), 5), state_of(FakeMatcher(), 5)]
    states[2].backend = PanickingBackend()  # type: ignore[assignment]
    masks.advance([GrammarRow(at, state, 5, known=False) for at, state in enumerate(states)], [1, 1, 1])
    rows = [GrammarRow(at, state, 6, known=False) for at, state in enumerate(states)]
    assert masks.collect(rows, 3).outcomes == {1: BAD_GRAMMAR, 2: BAD_GRAMMAR}
    masks.advance([GrammarRow(0, states[0], 6, known=False)], [1])
    assert not masks.collect([GrammarRow(0, states[0], 7, known=False)], 1).outcomes
    masks.close()
