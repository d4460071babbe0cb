"""The laws of the design, over random lifetimes of requests with logits processors; and planted bugs that
these find."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aioinfer import EngineConfig, errors
from aioinfer.engine import Engine
from aioinfer.execution import steering
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.loop.answers import Answers
from aioinfer.params import SamplingParams
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.sequence import SequenceState
from aioinfer.steering.state import SteeringState
from aioinfer.stream import Stream
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.engine.laws import watch
from tests.engine.processors import CALLER, Steering
from tests.engine.simulation import settle, simulate
from tests.engine.worlds import make_world, with_branches, with_processors, with_store
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled
from tests.toys import ToyDevice, ToyTokenizer

WORLDS = 30


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, 8), SIMULATION))
def test_random_lifetimes_with_processors_keep_every_law(block: int) -> None:
    """8 blocks of 30 worlds of 80 lifetimes: 19,200 in all. The rest has 600."""
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(3000 + WORLDS * block, 3000 + WORLDS * (block + 1)):
        make = with_processors(with_store(make_world) if seed % 4 == 0 else make_world)
        world, checker = simulate(seed, scaled(80, 20), make=make)
        assert world.steering is not None
        counts += world.counts + world.steering.counts
        totals += checker.totals()
    # Those that never answer are too rare for a block of the smallest scale.
    for what in ("failed", "finished", "cancelled", "asked"):
        assert counts[what] > 0, (what, counts)
    for what in ("forced_tokens", "deferred_rows", "retractions", "verified_rows", "updates"):
        assert totals[what] > 0, (what, totals)


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, 8), SIMULATION))
def test_random_lifetimes_with_branches_keep_every_law(block: int) -> None:
    """8 blocks of 30 worlds of 80 lifetimes, with 15,000 branches. The rest has 600."""
    counts: Counter[str] = Counter()
    for seed in range(4000 + WORLDS * block, 4000 + WORLDS * (block + 1)):
        make = with_branches(with_processors(make_world) if seed % 4 else with_store(make_world))
        world, _ = simulate(seed, scaled(80, 20), make=make)
        assert world.branching is not None
        counts += world.branching.counts
    for what in ("fork", "rewind", "inject", "left", "finished", "failed", "too early"):
        assert counts[what] > 0, (what, counts)


@rest(SECONDS)
@pytest.mark.parametrize("seed", grid([3003], [3004, 3005]))
def test_the_same_seed_takes_the_same_course_with_processors(seed: int) -> None:
    make = with_branches(with_processors(make_world))
    first, second = (simulate(seed, 60, make=make)[0] for _ in range(2))
    assert first.outcomes == second.outcomes
    assert first.device.steps == second.device.steps


def _uses_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer counts for the position behind, too."""
    steer, kept = steering.steer, dict[Any, Any]()

    def careless(rows: Sequence[Any], *lines: Any, **rest: Any) -> Any:
        for row in rows:
            answer = kept.pop(row.state, None)
            if row.state.answer is not None:
                kept[row.state] = row.state.answer
            elif answer is not None:
                row.state.answer = answer._replace(position=row.position)
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
    """Nobody asks for a request that has lost its pages."""
    ask = Answers.ask

    def forgetful(self: Answers, sequences: Sequence[Any]) -> None:
        ask(self, [each for each in sequences if each.state is SequenceState.RUNNING])

    monkeypatch.setattr(Answers, "ask", forgetful)


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


def _forgets_what_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that an answer forces are not told to the state."""
    settle = Answers._settle

    def silent(self: Answers, sequence: Any, forced: Sequence[int], answer: Any) -> None:
        settle(self, sequence, forced, answer)
        sequence.steering._count -= len(forced)

    monkeypatch.setattr(Answers, "_settle", silent)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (_uses_it_elsewhere, 3000),
        (_shares_states, 3000),
        (_hides_them_from_grammars, 3000),
        (_loses_questions, 3000),
        (_leaves_them_parked, 3000),
        (_lets_them_go_on, 3004),
        (_samples_void_rows, 3000),
        (_gives_one_less, 3000),
        (_keeps_old_answers, 3001),
        (_forgets_what_is_forced, 3006),
    ],
)
def test_random_lifetimes_find_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: of the seeds, one that finds it, or shortly before."""
    plant(monkeypatch)
    monkeypatch.setattr("tests.engine.simulation._LONGEST", 100.0)  # what hangs shows sooner
    make = with_processors(make_world)
    if plant is not _lets_them_go_on:
        make = with_branches(make)
    with pytest.raises(BaseException, match="seed="):
        for seed in range(first, first + 100):
            simulate(seed, 60, make=make)


@rest(SECONDS)
def test_forks_that_are_cancelled_at_random_leave_nothing() -> None:
    """10,000; the rest has 1,250. What is left of pages, slots, locks and tasks is looked at in the end."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(2)) as runner:
        runner.run(_fork_and_cancel(scaled(10_000)))


async def _fork_and_cancel(most: int) -> None:
    dice, count, children = random.Random(5), 0, list[Stream]()
    config = EngineConfig(model="toy", page_size=4, max_running_requests=32, grammar_patience=1000.0)
    device = ToyDevice(num_pages=400, page_size=4, num_slots=config.num_slots)
    device.masks.patience = 1000.0
    launcher = TimedLauncher(device, lambda _: 0.0005)
    steering = Steering(dice)
    CALLER.set(0)
    async with Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: ToyTokenizer()) as engine:
        checker = watch(engine)
        streams: list[Stream] = []
        while count < most:
            if not streams:
                params = SamplingParams(max_tokens=60, seed=dice.randrange(1 << 30), ignore_eos=True)
                params = steering.choose(params, patient=dice.random() < 0.8)
                stream = engine.generate(dice.choices(range(1, 64), k=dice.choice([3, 20])), params)
                streams.append(stream)
                await stream.accepted()
            parent = dice.choice(streams)
            with contextlib.suppress(errors.InvalidRequest, errors.Rejected, RuntimeError):
                children = parent.fork(
                    dice.choice([1, 2, 4, 16]), then=dice.choices(range(1, 64), k=dice.choice([0, 2]))
                )
                count += len(children)
                streams += children
            await asyncio.sleep(dice.choice([0.0, 0.02, 0.1]))
            dice.shuffle(streams)
            while len(streams) > 60 or (streams and dice.random() < 0.4):
                stream = streams.pop()
                if dice.random() < 0.5:
                    stream.close()
                elif dice.random() < 0.5:
                    reader = asyncio.ensure_future(_all(stream))
                    await asyncio.sleep(0)
                    reader.cancel()
                    await asyncio.wait([reader])
                del stream
        del parent, children
        for stream in streams:
            stream.close()
        del stream
        streams.clear()
        gc.collect()
        await asyncio.sleep(0.001)  # coroutines hear of it a turn later
        await settle(engine)
        assert not steering.asking, "a coroutine goes on for nobody"
        assert checker.totals()["hit_tokens"] > most // 10
        assert engine.stats().output_tokens > most // 10
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _all(stream: Stream) -> None:
    with contextlib.suppress(errors.RequestError):
        async for _ in stream:
            pass
