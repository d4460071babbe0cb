"""Adapters of a dispatcher: on all its replicas, near and behind sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aioinfer import StreamCheckpoint
from aioinfer.errors import ConfigError, EngineFailed, InvalidRequest
from aioinfer.parallel import Dispatcher
from aioinfer.testing.toy_adapters import ToyAdapter, write_toy_adapter
from tests.parallel.framed import FramedDispatcher, FramedReplica
from tests.parallel.test_complaints import end, turn
from tests.parallel.toys import ENDLESS, PARAMS, STEP, Toy, expected, prompt, record, toys, virtual

Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda content: write_toy_adapter(tmp_path / f"of-{content}", content)


async def ask(dispatcher: Dispatcher, number: int) -> list[int]:
    return (await dispatcher.generate(prompt(number), PARAMS, adapter="a")).token_ids


def wanted(number: int, path: Path) -> list[int]:
    return expected(prompt(number), PARAMS, ToyAdapter.read(path).key)


def local(engines: list[Toy], **options: Any) -> Dispatcher:
    return Dispatcher(engines, **options)


def framed(engines: list[Toy], **options: Any) -> Dispatcher:
    return FramedDispatcher(engines, dice=random.Random(3), **options)


Kind = Callable[..., Dispatcher]
both = pytest.mark.parametrize("kind", [local, framed])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual(work)()


async def loaded(engine: Toy, count: int) -> None:
    """So many adapters are on its device when nothing is in flight."""
    await asyncio.sleep(5 * STEP)
    assert len(engine.device.adapters.installed) == count
    engine._core.adapters.audit()


@both
def test_every_replica_loads_replaces_and_unloads(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(3)
        async with kind(engines, policy="round_robin") as dispatcher:
            info = await dispatcher.load_adapter("a", make("1"))
            assert (info.name, info.rank, info.path) == ("a", 8, str(make("1")))
            names = ["a", None] * 6
            streams = [dispatcher.generate(prompt(n), PARAMS, adapter=name) for n, name in enumerate(names)]
            await turn()
            assert [each.requests for each in dispatcher.adapters()] == [6]
            for number, stream in enumerate(streams):
                ids = (await stream).token_ids
                assert ids == (expected(prompt(number)) if number % 2 else wanted(number, make("1")))
            await dispatcher.load_adapter("a", make("2"))
            assert await ask(dispatcher, 1) == wanted(1, make("2"))
            await dispatcher.load_adapter("b", make("3"))
            assert [each.name for each in dispatcher.adapters()] == ["a", "b"]
            assert dispatcher.stats().adapters_loaded == (
                6 if kind is local else dispatcher.stats().adapters_loaded
            )
            await dispatcher.unload_adapter("a")
            with pytest.raises(InvalidRequest, match="'a' is not loaded; there are: 'b'") as refused:
                dispatcher.generate(prompt(1), PARAMS, adapter="a")
            assert refused.value.field == "adapter"
            with pytest.raises(InvalidRequest) as refused:
                await dispatcher.unload_adapter("a")
            assert (refused.value.field, refused.value.code) == ("name", "adapter_not_found")
            for engine in engines:
                await loaded(engine, 1)

    run(work)


@both
def test_a_stream_goes_on_with_its_adapter_where_a_replica_is_lost(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(2)
        async with kind(engines, policy="round_robin") as dispatcher:
            await dispatcher.load_adapter("a", make("1"))
            streams = [dispatcher.generate(prompt(number), PARAMS, adapter="a") for number in range(4)]
            await asyncio.sleep(4.5 * STEP)
            engines[0].lose()
            for number, stream in enumerate(streams):
                assert (await stream).token_ids == wanted(number, make("1"))
            assert dispatcher.stats().resumed == 2

    run(work)


@both
def test_a_replica_that_starts_again_has_what_the_others_have(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(2)
        async with kind(engines, policy="round_robin") as dispatcher:
            await dispatcher.load_adapter("a", make("1"))
            await dispatcher.restart("local-0")
            await loaded(engines[0], 1)
            await dispatcher.remove("local-1")
            assert await ask(dispatcher, 1) == wanted(1, make("1"))
            await dispatcher.add(other := Toy())
            await loaded(other, 1)

    run(work)


@both
def test_what_one_replica_refuses_none_has(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(3)
        async with kind(engines) as dispatcher:
            await dispatcher.load_adapter("a", make("1"))

            def prepare(path: Path) -> Any:
                raise ConfigError("q_proj: has another shape")

            engines[1].device.prepare_adapter = prepare  # type: ignore[method-assign]
            for name in ("b", "a"):
                with pytest.raises(ConfigError, match="q_proj: has another shape"):
                    await dispatcher.load_adapter(name, make("2"))
            assert [each.name for each in dispatcher.adapters()] == ["a"]
            for engine in engines:
                await loaded(engine, 1)
            with pytest.raises(InvalidRequest):
                await dispatcher.load_adapter("", make("2"))

    run(work)


@both
def test_requests_go_only_where_their_adapter_is(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(3)
        async with kind(engines, policy="round_robin") as dispatcher:
            await dispatcher._replicas[1].load_adapter("a", str(make("1")))
            streams = [dispatcher.generate(prompt(number), PARAMS, adapter="a") for number in range(4)]
            await turn()
            attempts = [record(each).attempt for each in streams]
            assert {each.replica.name for each in attempts if each is not None} == {"local-1"}
            for number, stream in enumerate(streams):
                assert (await stream).token_ids == wanted(number, make("1"))
            stream = dispatcher.generate(prompt(1), ENDLESS, adapter="a")
            await asyncio.sleep(5 * STEP)
            engines[1].lose()
            with pytest.raises(EngineFailed, match="no replica left has its adapter 'a'"):
                await stream

    run(work)


@both
def test_an_output_goes_on_with_the_same_files_only(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(2)
        async with kind(engines, policy="round_robin") as dispatcher:
            await dispatcher.load_adapter("a", make("1"))
            stream = dispatcher.generate(prompt(0), PARAMS, adapter="a")
            await asyncio.sleep(4.5 * STEP)
            checkpoint = StreamCheckpoint.from_json(stream.checkpoint().to_json())
            assert (checkpoint.adapter, len(checkpoint.adapter_fingerprint)) == ("a", 16)
            assert (await dispatcher.restore(checkpoint)).token_ids == wanted(0, make("1"))
            lost = dispatcher.generate(prompt(1), ENDLESS, adapter="a")
            await asyncio.sleep(4.5 * STEP)
            await dispatcher.load_adapter("a", make("2"))
            with pytest.raises(InvalidRequest, match="checkpoint: adapter: 'a' was loaded here from other"):
                dispatcher.restore(checkpoint)
            attempt = record(lost).attempt
            assert attempt is not None
            engines[int(attempt.replica.name[-1])].lose()
            with pytest.raises(EngineFailed, match="adapter"):
                await lost

    run(work)


@both
def test_requests_that_wait_for_a_replica_get_the_newest_or_an_error(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(1, max_running_requests=1)
        async with kind(engines) as dispatcher:
            await dispatcher.load_adapter("a", make("1"))
            busy = dispatcher.generate(prompt(5), ENDLESS)
            waiting = dispatcher.generate(prompt(0), PARAMS, adapter="a")
            await asyncio.sleep(3 * STEP)
            await dispatcher.load_adapter("a", make("2"))
            await end([busy])
            assert (await waiting).token_ids == wanted(0, make("2"))
            busy = dispatcher.generate(prompt(5), ENDLESS)
            waiting = dispatcher.generate(prompt(0), PARAMS, adapter="a")
            await asyncio.sleep(3 * STEP)
            await dispatcher.unload_adapter("a")
            await end([busy])
            with pytest.raises(InvalidRequest, match="'a' is not loaded"):
                await waiting

    run(work)


@both
def test_a_load_that_is_cancelled_leaves_nothing(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(2, max_adapters=1)
        async with kind(engines) as dispatcher:
            streams: list[Any] = []
            for name in ("1", "2"):
                await dispatcher.load_adapter("a", make(name))
                streams += [dispatcher.generate(prompt(n), ENDLESS, adapter="a") for n in range(4)]
                await asyncio.sleep(3 * STEP)
            load = asyncio.ensure_future(dispatcher.load_adapter("a", make("3")))
            await asyncio.sleep(3 * STEP)
            assert not load.done(), "versions that drain have all slots"
            load.cancel()
            await asyncio.wait([load])
            await end(streams)
            for engine in engines:
                await loaded(engine, 1)
            assert {each.fingerprint for engine in engines for each in engine.adapters()} == {
                each.fingerprint for each in dispatcher.adapters()
            }

    run(work)


def test_a_replica_that_is_lost_while_it_loads_does_not_count(make: Make) -> None:
    async def work() -> None:
        engines = toys(2)
        async with framed(engines) as dispatcher:
            first = dispatcher._replicas[0]
            assert isinstance(first, FramedReplica)

            def prepare(path: Path) -> Any:
                first.die()
                return ToyAdapter.read(path)

            engines[0].device.prepare_adapter = prepare  # type: ignore[method-assign]
            await dispatcher.load_adapter("a", make("1"))
            assert await ask(dispatcher, 1) == wanted(1, make("1"))

    run(work)


@both
@pytest.mark.parametrize("steps", [0.5, 4.5], ids=["before its first token", "behind it"])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "unloaded"])
def test_a_draining_replica_finishes_what_has_an_adapter_that_is_gone(
    kind: Kind, make: Make, replaced: bool, steps: float
) -> None:
    async def work() -> None:
        engines = toys(2)
        async with kind(engines, policy="round_robin") as dispatcher:
            await dispatcher.load_adapter("a", make("1"))
            streams = [dispatcher.generate(prompt(number), PARAMS, adapter="a") for number in range(2)]
            await asyncio.sleep(steps * STEP)
            assert bool(record(streams[0]).output_ids) == (steps > 1)
            if replaced:
                await dispatcher.load_adapter("a", make("2"))
            else:
                await dispatcher.unload_adapter("a")
            await dispatcher.restart("local-0")
            for number, stream in enumerate(streams):
                assert (await stream).token_ids == wanted(number, make("1"))
            assert dispatcher.stats().resumed == 0

    run(work)
