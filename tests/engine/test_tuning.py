"""What an engine changes in the process is put back by whoever closes last, never over somebody else's."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Iterator

import pytest

from aioinfer.errors import EngineFailed
from aioinfer.loop import tuning
from aioinfer.loop.tuning import Garbage, Shared, Tuning, frozen
from aioinfer.params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.test_launchers import AsynchronousToy
from tests.joining import still_alive
from tests.tiers import SECONDS, rest


def process() -> tuple[float, bool, bool]:
    """What there is to change."""
    return sys.getswitchinterval(), gc.isenabled(), frozen()


@pytest.fixture(autouse=True)
def _as_it_was(thawed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Full collections are left out: they would go through everything that other tests imported."""
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda generation=2: collect(min(generation, 1)))
    before = process()
    yield
    assert process() == before
    for setting in (tuning.SWITCH_INTERVAL, tuning.FROZEN, tuning.AUTOMATIC_GC):
        assert not setting._wanted, "somebody still wants something"


class Box:
    """A setting to try on."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.writes: list[float] = []

    def write(self, value: float) -> None:
        self.value = value
        self.writes.append(value)

    def shared(self) -> Shared[float]:
        return Shared(lambda: self.value, self.write, min)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_the_last_to_leave_restores_what_the_first_found(order: tuple[int, ...]) -> None:
    box = Box(5)
    shared = box.shared()
    holders = [shared.hold(wanted) for wanted in (3, 2, 4)]
    assert box.value == 2
    left = [3.0, 2.0, 4.0]
    for at in order:
        shared.release(holders[at])
        left[at] = 5
        assert box.value == min(left)
    assert box.value == 5


def test_what_somebody_else_changed_is_left_until_all_are_gone() -> None:
    box = Box(5)
    shared = box.shared()
    first = shared.hold(2)
    box.value = 7
    second = shared.hold(1)
    shared.release(first)
    shared.release(second)
    assert box.value == 7
    shared.release(shared.hold(3))
    assert box.writes == [2, 3, 7], "the next one finds theirs, and restores it"


@rest(SECONDS)
def test_what_the_application_froze_is_not_thawed() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    tuned = Tuning(None, garbage=True)
    assert gc.get_freeze_count() <= count, "and not frozen again"
    tuned.undo()
    assert frozen()
    gc.unfreeze()


def test_an_application_without_automatic_collection_keeps_it_so() -> None:
    gc.disable()
    garbage = Garbage()
    garbage.launched()
    garbage.rest()
    assert not gc.isenabled()
    gc.enable()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The generations of collections, which are not made."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))
    return found


def test_nothing_is_collected_between_launches_but_now_and_then(collected: list[int]) -> None:
    garbage = Garbage(lambda: 0.0)
    for _ in range(255):
        garbage.launched()
    assert not gc.isenabled()
    assert collected == []
    for _ in range(2 * 16 * 256 - 255):
        garbage.launched()
    assert collected == ([1] * 15 + [2]) * 2, "what lives longer is collected too, however busy the engine is"
    garbage.rest()
    garbage.rest()
    assert gc.isenabled()
    assert len(collected) == 33


def test_full_collections_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of streams one takes long: the next one waits."""
    clock, full = 0.0, []

    def collect(generation: int = 2) -> None:
        nonlocal clock
        if generation == 2:
            full.append(clock)
            clock += 0.1

    monkeypatch.setattr(gc, "collect", collect)
    garbage = Garbage(lambda: clock)
    while clock < 1000.0:
        garbage.launched()
        clock += 0.006
    assert len(full) == 5
    assert 200.0 <= min(b - a for a, b in itertools.pairwise(full)) < 203.0
    garbage.rest()


@rest(SECONDS)
@pytest.mark.parametrize(
    ("interval", "garbage", "asynchronous", "thread", "tuned"),
    [
        (None, "auto", False, True, (False, False)),
        (None, "auto", True, True, (True, True)),
        (None, "auto", True, False, (False, True)),
        (0.0, "python", True, True, (False, False)),
        (2e-4, "idle", False, False, (True, True)),
    ],
)
def test_defaults_are_for_asynchronous_devices(
    interval: float | None, garbage: str, asynchronous: bool, thread: bool, tuned: tuple[bool, bool]
) -> None:
    before = sys.getswitchinterval()
    made = Tuning.of(interval, garbage, asynchronous=asynchronous, thread=thread)
    assert (sys.getswitchinterval() < before, frozen()) == tuned
    made.undo()


# -- engines -----------------------------------------------------------------------------------------------


async def test_an_engine_on_a_synchronous_device_changes_nothing(make_engine: MakeEngine) -> None:
    before = process()
    async with make_engine() as engine:
        await engine.generate([1, 2], SamplingParams(max_tokens=4))
        assert process() == before


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_nothing_is_collected_while_steps_are_in_flight(make_engine: MakeEngine, mode: str) -> None:
    before = process()
    async with make_engine(device=AsynchronousToy(), launch_mode=mode, overlap_steps=2) as engine:
        assert process() == (pytest.approx(3e-4) if mode == "thread" else before[0], True, True)
        stream = engine.generate([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
        await anext(stream)
        assert engine.stats().steps_in_flight
        assert not gc.isenabled()
        await stream
        while engine.stats().steps_in_flight:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert gc.isenabled()
    assert process() == before


@rest(SECONDS)
async def test_no_collection_of_a_ramp_up_has_many_new_objects(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection takes as long as there are new objects: 70 ms for those of 2,048 streams."""
    sizes: list[int] = []
    collect = gc.collect

    def counted(generation: int = 2) -> int:
        sizes.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))
        return collect(generation)

    engine = make_engine(device=AsynchronousToy())
    async with engine:
        streams = [engine.generate([1, 2], SamplingParams(max_tokens=400, ignore_eos=True))]
        await anext(streams[0])
        assert not gc.isenabled()
        monkeypatch.setattr(gc, "collect", counted)
        before = len(gc.get_objects())
        streams += [
            engine.generate([1, number % 64], SamplingParams(max_tokens=2)) for number in range(1, 1001)
        ]
        new = len(gc.get_objects()) - before
        assert not gc.isenabled()
        assert len(sizes) >= 30
        assert max(sizes[1:]) < new / 10, "too much was left to one collection"
        monkeypatch.undo()
        for stream in streams:
            stream.close()


@rest(SECONDS)
async def test_a_lost_device_leaves_collection_on(make_engine: MakeEngine) -> None:
    engine = make_engine(device=AsynchronousToy())
    await engine.start()
    stream = engine.generate([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(stream)
    assert not gc.isenabled()
    engine._started().lost(RuntimeError("gone"))
    assert gc.isenabled()
    with pytest.raises(EngineFailed):
        await stream
    await engine.aclose()


@rest(SECONDS)
def test_a_loop_that_died_takes_its_tuning_along(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    engine = make_engine(device=AsynchronousToy())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    assert frozen()
    loop.close()
    asyncio.run(engine.aclose())
    assert not frozen()
    # Its threads end with its launcher, which must not be frozen behind this test.
    del engine
    monkeypatch.undo()
    gc.collect()
    assert not still_alive(set(threading.enumerate()) - before)
