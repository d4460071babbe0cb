"""An exception at every call that planning, packing and resolving make: it costs the requests that it
concerns, or the engine, and it is never silent.

The calls are found by running a world once under ``sys.setprofile``; then it is run again for each of them,
and the hook raises when that call begins or returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import aioinfer
from aioinfer import errors
from aioinfer.engine import EngineState
from aioinfer.loop.driver import Driver
from aioinfer.scheduling.audit import audit
from aioinfer.testing import VirtualLoop
from tests.counting import no_collection
from tests.engine.block_worlds import make_block_world
from tests.engine.reading import Injected
from tests.engine.simulation import settle
from tests.engine.worlds import VOCAB, Claim, World, make_world
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled

PACKAGE = str(Path(aioinfer.__file__).parent) + "/"
#: the simulation itself
OUTSIDE = ("testing/virtual_time.py", "testing/virtual_launcher.py")
REQUESTS = 9
#: what the hook counts: file, function, "call" or "return"
Call = tuple[str, str, str]


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Of other tests, which an engine may collect amid a turn: a fault in a finalizer is nobody's."""
    gc.collect()


class Hook:
    """Counts the calls that turns of the driver make; raises at the ``nth`` of ``target``."""

    def __init__(self, target: Call | None = None, nth: int = 0) -> None:
        self.target = target
        self.left = nth
        self.calls: Counter[Call] = Counter()
        #: when it raised, in virtual seconds
        self.raised_at: float | None = None
        # One bound method that is kept: where a hook raises, CPython 3.11 has been seen to call one that was
        # gone ("'traceback' object is not callable").
        self._hook = self._called

    def turn(self, driver: Driver) -> None:
        with no_collection():
            sys.setprofile(self._hook)
            try:
                type(self).turn_of(driver)
            finally:
                sys.setprofile(None)

    turn_of = staticmethod(Driver._turn)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        call = (file, code.co_qualname, event)
        if file in OUTSIDE:
            return
        self.calls[call] += 1
        if call == self.target and self.raised_at is None:
            self.left -= 1
            if self.left <= 0:
                self.raised_at = asyncio.get_running_loop().time()
                raise Injected(f"{event} of {code.co_qualname}")


@dataclasses.dataclass
class Course:
    """What came of a world."""

    hook: Hook
    state: EngineState
    failed: list[BaseException] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)


async def one(world: World, course: Course, number: int, dice: random.Random) -> None:
    common = random.Random(dice.randrange(2)).choices(range(1, VOCAB), k=12)
    length = min(dice.choice([2, 9, 20]), world.engine.info.max_model_len - 2)
    prompt, params = [*common, *dice.choices(range(1, VOCAB), k=20)][:length], world.params(dice)
    options = {"priority": dice.randrange(3), "routing_key": dice.choice([None, "a"]), "max_lag": 2}
    await asyncio.sleep(dice.choice([0.0, 0.01, 0.05]))
    ids: list[int] = []
    text, reason = "", None
    try:
        async for chunk in world.engine.generate(prompt, params, **options):  # type: ignore[arg-type]
            ids += chunk.token_ids
            text += chunk.text
            reason = chunk.finish_reason
            if dice.random() < 0.2:
                await asyncio.sleep(0.02)
    except errors.EngineError as error:
        course.failed.append(error)
        assert _root(error) is Injected, repr(error)
        return
    assert reason is not None, "the stream ended without a reason"
    course.claims.append(Claim(number, "read", prompt, params, ids, text, reason, None))


def _root(error: BaseException) -> type[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error)


async def run(world: World, hook: Hook, seed: int) -> Course:
    await world.engine.start()
    course = Course(hook, EngineState.RUNNING)
    dice = random.Random(seed)
    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(one(world, course, number, random.Random(dice.randrange(1 << 30))))
    engine, course.state, hook.target = world.engine, world.engine.state, None
    world.verify(world, course.claims)
    if course.state is EngineState.RUNNING:
        audit(engine._core.scheduler)
        params = dataclasses.replace(world.params(dice), max_tokens=5)
        after = await engine.generate([1, 2], params)
        claim = Claim(
            REQUESTS, "await", [1, 2], params, after.token_ids, after.text, after.finish_reason, after
        )
        world.verify(world, [claim])
        await settle(engine)
    else:
        assert course.state is EngineState.FAILED
        assert not engine.ready
        assert isinstance(engine._started().failure, Exception)
        with pytest.raises(errors.EngineFailed):
            engine.generate([1])
    await engine.aclose()
    return course


def simulate(kind: Any, seed: int, hook: Hook) -> Course:
    world: World = kind(seed, 0.0)
    loop = VirtualLoop(seed, executor_delay=0.003)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "_turn", lambda driver: hook.turn(driver))
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                return runner.run(run(world, hook, seed))
        except BaseException as error:
            error.add_note(f"{kind.__name__} seed={seed} target={hook.target} {world.engine.config}")
            raise


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "aioinfer"):
        yield


def survey(kind: Any, seed: int) -> Counter[Call]:
    hook = Hook()
    course = simulate(kind, seed, hook)
    assert course.state is EngineState.RUNNING
    assert len(course.claims) == REQUESTS
    return hook.calls


# A generator that is dropped cannot raise: what the hook raises when it ends is only reported.
@rest(SECONDS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [make_world, make_block_world])
@pytest.mark.parametrize("seed", grid([3], [100], SIMULATION))
def test_an_exception_anywhere_in_a_turn_is_survived_or_loud(kind: Any, seed: int) -> None:
    calls = survey(kind, seed)
    dice = random.Random(seed)
    chosen = sorted(calls)
    states: Counter[EngineState] = Counter()
    for call in dice.sample(chosen, scaled(len(chosen) // 10, 10)):
        course = simulate(kind, seed, Hook(call, dice.randint(1, calls[call])))
        if course.hook.raised_at is None:
            continue  # an earlier end of another request: the call was not made so often
        states[course.state] += 1
    assert states[EngineState.RUNNING] > 2, states


@rest(SECONDS)
@pytest.mark.parametrize("kind", [make_world, make_block_world])
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("scheduling/scheduler.py", "Scheduler.plan"),
        ("scheduling/scheduler.py", "Scheduler._admit"),
        ("scheduling/scheduler.py", "Scheduler._chunk"),
        ("loop/core.py", "Core.resolve"),
        ("scheduling/scheduler.py", "Scheduler.resolve"),
    ],
)
@pytest.mark.parametrize("part", grid([0.3], [0.0, 0.5]))
def test_planning_or_committing_that_raises_ends_the_requests_of_that_step_alone(
    kind: Any, file: str, name: str, part: float
) -> None:
    call = file, name, "call"
    course = simulate(kind, 3, Hook(call, 1 + int(survey(kind, 3)[call] * part)))
    assert course.hook.raised_at is not None
    assert course.state is EngineState.RUNNING
    assert course.failed
    assert course.claims
    assert len(course.failed) + len(course.claims) == REQUESTS
