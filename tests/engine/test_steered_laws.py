"""The laws of the design, over random lifetimes of requests with logits processors; and planted bugs that
these find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aioinfer.execution import steering
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.loop.answers import Answers
from aioinfer.loop.core import Core
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.steering.state import SteeringState
from tests.engine.simulation import simulate
from tests.engine.worlds import make_world, with_processors, with_store
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled

WORLDS = 60


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, 4), SIMULATION))
def test_random_lifetimes_with_processors_keep_every_law(block: int) -> None:
    """4 blocks of 60 worlds of 80 lifetimes: 19,200 in all. The rest has 1,200."""
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(3000 + WORLDS * block, 3000 + WORLDS * (block + 1)):
        make = with_processors(with_store(make_world) if seed % 4 == 0 else make_world)
        world, checker = simulate(seed, scaled(80, 20), make=make)
        assert world.steering is not None
        counts += world.counts + world.steering.counts
        totals += checker.totals()
    for what in ("failed", "finished", "cancelled", "asked", "never answered"):
        assert counts[what] > 0, (what, counts)
    for what in ("forced_tokens", "deferred_rows", "retractions", "verified_rows", "updates"):
        assert totals[what] > 0, (what, totals)


@rest(SECONDS)
@pytest.mark.parametrize("seed", grid([3003], [3004, 3005]))
def test_the_same_seed_takes_the_same_course_with_processors(seed: int) -> None:
    first, second = (simulate(seed, 60, make=with_processors(make_world))[0] for _ in range(2))
    assert first.outcomes == second.outcomes
    assert first.device.steps == second.device.steps


def _uses_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer counts at whatever position."""
    steer = steering.steer

    def careless(rows: Sequence[Any], *lines: Any, **rest: Any) -> Any:
        for row in rows:
            if row.state.answer is not None:
                row.state.answer = row.state.answer._replace(position=row.position)
        return steer(rows, *lines, **rest)

    monkeypatch.setattr("tests.toys.device.steer", careless)


def _shares_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry goes on with the states of the one before."""
    monkeypatch.setattr(SteeringState, "_copies", lambda self, processors: tuple(processors))


def _hides_them_from_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar does not hear of the tokens that processors force."""
    advance = GrammarWorker.advance
    monkeypatch.setattr(
        GrammarWorker, "advance", lambda self, rows, tokens, given=None: advance(self, rows, tokens)
    )


def _loses_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers a request that has lost its pages."""
    retract = RequestQueues.retract

    def forgetful(self: RequestQueues, sequence: Any) -> None:
        retract(self, sequence)
        self.asked = [each for each in self.asked if each is not sequence]

    monkeypatch.setattr(RequestQueues, "retract", forgetful)


def _leaves_them_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has lost its pages stays parked."""
    unpark = RequestQueues.unpark

    def idle(self: RequestQueues, sequence: Any, *waits: Any) -> None:
        if not waits or sequence.key not in self.shelved:
            unpark(self, sequence, *waits)

    monkeypatch.setattr(RequestQueues, "unpark", idle)


def _lets_them_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine is not cancelled with its request."""
    monkeypatch.setattr(Answers, "drop", lambda self, sequence: None)


def _samples_void_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row behind one that was asked counts as one with an input."""
    steer = steering.steer
    monkeypatch.setattr(
        "tests.toys.device.steer",
        lambda rows, *lines, **rest: steer([row._replace(known=True) for row in rows], *lines, **rest),
    )


def _gives_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors do not see the newest token."""
    ids = SteeringState.ids
    monkeypatch.setattr(SteeringState, "ids", lambda self, drafts=(): ids(self, drafts)[:-1])


def _keeps_old_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was answered to logits of earlier weights holds."""
    monkeypatch.setattr(SteeringState, "forget", lambda self: None)


def _samples_what_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that an answer forces are not told to the state."""
    answered = Core.answered

    def silent(self: Core, sequence: Any, forced: Sequence[int], answer: Any) -> None:
        extend, state = SteeringState.extend, sequence.steering
        if forced:
            state._count -= len(forced)
        answered(self, sequence, forced, answer)
        assert extend

    monkeypatch.setattr(Core, "answered", silent)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (_uses_it_elsewhere, 0),
        (_shares_states, 0),
        (_hides_them_from_grammars, 0),
        (_loses_questions, 0),
        (_leaves_them_parked, 0),
        (_lets_them_go_on, 0),
        (_samples_void_rows, 0),
        (_gives_one_less, 0),
        (_keeps_old_answers, 0),
        (_samples_what_is_answered, 0),
    ],
)
def test_random_lifetimes_find_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: of the seeds, shortly before the one that finds it."""
    plant(monkeypatch)
    with pytest.raises(BaseException, match="seed="):
        for seed in range(first, first + 100):
            print("at", seed)
            simulate(seed, 60, make=with_processors(make_world))
