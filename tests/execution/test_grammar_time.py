"""A grammar that takes too much processor time ends its own output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.execution import grammar_worker
from aioinfer.execution.grammar_worker import GrammarRow, GrammarWorker
from aioinfer.sampling.outcomes import BAD_GRAMMAR
from aioinfer.text import grammar
from aioinfer.text.grammar import MOST_SECONDS, GrammarState, Matcher
from aioinfer.text.grammar_spec import Grammar


class Clock:
    """Processor time that passes in the calls of a matcher only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (grammar, grammar_worker):
            monkeypatch.setattr(module.time, "thread_time", lambda: self.now)


class Slow:
    """A matcher, with its backend, that takes some time per token and per mask."""

    error: str | None = None
    stopped = False

    def __init__(self, clock: Clock, token: float, mask: float) -> None:
        self.clock, self.token, self.mask = clock, token, mask

    def accept(self, token: int) -> bool:
        self.clock.now += self.token
        return True

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Matcher:
        return self

    def compile(self, grammar: Grammar) -> Matcher:
        return self

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        self.clock.now += self.mask
        for mask in masks:
            mask[:] = 6


def tokens_until_it_fails(states: list[GrammarState], most: int) -> tuple[int, dict[int, int]]:
    worker = GrammarWorker(threaded=False)
    for at in range(most):
        for state in states:  # slow ones come one by one
            worker.advance([GrammarRow(0, state, at, known=False)], [1])
        rows = [GrammarRow(row, state, at + 1, known=False) for row, state in enumerate(states)]
        if outcomes := worker.collect(rows, len(rows)).outcomes:
            return at + 1, outcomes
    return most, {}


@pytest.mark.parametrize(("token", "mask"), [(0.1, 0.0), (0.0, 0.1), (0.05, 0.05)])
def test_a_slow_grammar_ends_alone_and_by_name(
    monkeypatch: pytest.MonkeyPatch, token: float, mask: float
) -> None:
    clock = Clock(monkeypatch)
    states = [
        GrammarState(matcher, matcher, 0, 32)
        for matcher in (Slow(clock, 0.0001, 0.0001), Slow(clock, token, mask), Slow(clock, 0.002, 0.002))
    ]
    count, outcomes = tokens_until_it_fails(states, 1000)
    assert outcomes == {1: BAD_GRAMMAR}
    assert MOST_SECONDS < count * 0.1 < MOST_SECONDS + 0.5
    assert "seconds of processor time" in (states[1].failed or "")
    assert not states[1].broken
    assert states[0].overtime == states[2].overtime == 0.0


def test_its_time_goes_on_when_the_output_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    matcher = Slow(clock, 0.1, 0.0)
    state = GrammarState(matcher, matcher, 0, 32)
    assert tokens_until_it_fails([state], 10) == (10, {})
    again = state.restarted([1] * 4)
    worker = GrammarWorker(threaded=False)
    worker.collect([GrammarRow(0, again, 4, known=True)], 1)
    assert again.overtime == pytest.approx(state.overtime + 4 * (0.1 - 0.005))


def test_a_first_mask_that_takes_too_long_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Slow(Clock(monkeypatch), 0.0, 2.5)
    with pytest.raises(InvalidRequest, match=r"grammar: .* processor time"):
        GrammarState(matcher, matcher, 0, 32).start()
