"""Adapters of a dispatcher: on all its replicas, near and behind sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer import StreamCheckpoint
from aioinfer.engine import EngineState
from aioinfer.errors import ConfigError, EngineFailed, InvalidRequest
from aioinfer.parallel import Dispatcher
from tests.parallel.framed import FramedReplica, Kind, both, framed
from tests.parallel.toys import (
    ENDLESS,
    PARAMS,
    STEP,
    Toy,
    attempt_of,
    end,
    expected,
    prompt,
    record,
    sent,
    toys,
    turn,
    virtual,
)
from tests.toys.adapters import ToyAdapter, write_toy_adapter

Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda content: write_toy_adapter(tmp_path / f"of-{content}", content)


async def ask(dispatcher: Dispatcher, number: int) -> list[int]:
    return (await dispatcher.generate(prompt(number), PARAMS, adapter="a")).token_ids


def wanted(number: int, path: Path) -> list[int]:
    return expected(prompt(number), PARAMS, ToyAdapter.read(path).key)


async def loaded(engine: Toy, count: int) -> None:
    """So many adapters are on its device when nothing is in flight."""
    await asyncio.sleep(5 * STEP)
    assert len(engine.device.adapters.installed) == count
    engine._core.adapters.audit()


@both
@virtual
async def test_every_replica_loads_replaces_and_unloads(kind: Kind, make: Make) -> None:
    engines = toys(3)
    async with kind(engines) as dispatcher:
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
        assert kind is framed or dispatcher.stats().adapters_loaded == 6
        await dispatcher.unload_adapter("a")
        with pytest.raises(InvalidRequest, match="'a' is not loaded; there are: 'b'") as refused:
            dispatcher.generate(prompt(1), PARAMS, adapter="a")
        assert refused.value.field == "adapter"
        with pytest.raises(InvalidRequest) as refused:
            await dispatcher.unload_adapter("a")
        assert (refused.value.field, refused.value.code) == ("name", "adapter_not_found")
        for engine in engines:
            await loaded(engine, 1)


@both
@virtual
async def test_a_stream_goes_on_with_its_adapter_where_a_replica_is_lost(kind: Kind, make: Make) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        streams = [dispatcher.generate(prompt(number), PARAMS, adapter="a") for number in range(4)]
        await asyncio.sleep(4.5 * STEP)
        engines[0].lose()
        for number, stream in enumerate(streams):
            assert (await stream).token_ids == wanted(number, make("1"))
        assert dispatcher.stats().resumed == 2


@both
@virtual
async def test_a_replica_that_starts_again_has_what_the_others_have(kind: Kind, make: Make) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        await dispatcher.restart("local-0")
        await loaded(engines[0], 1)
        await dispatcher.remove("local-1")
        assert await ask(dispatcher, 1) == wanted(1, make("1"))
        await dispatcher.add(other := Toy())
        await loaded(other, 1)


@both
@pytest.mark.parametrize(
    ("other", "message"),
    [(None, "q_proj: has another shape"), ("3", "its files differ between the replicas")],
)
@virtual
async def test_what_one_replica_refuses_none_has(
    kind: Kind, make: Make, other: str | None, message: str
) -> None:
    """``other``: instead, it has other files under the same path."""
    engines = toys(3)
    async with kind(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        load, path = engines[1].load_adapter, str(make("2"))

        async def differs(name: str, asked: Any) -> Any:
            if asked != path:
                return await load(name, asked)
            if other is None:
                raise ConfigError(message)
            return dataclasses.replace(await load(name, make(other)), path=path)

        engines[1].load_adapter = differs  # type: ignore[method-assign]
        for name in ("b", "a"):
            with pytest.raises(ConfigError, match=message):
                await dispatcher.load_adapter(name, path)
        assert [each.name for each in dispatcher.adapters()] == ["a"]
        assert held_by(engines) == [str(make("1"))] * 3
        for engine in engines:
            await loaded(engine, 1)
        assert await ask(dispatcher, 1) == wanted(1, make("1"))
        with pytest.raises(InvalidRequest):
            await dispatcher.load_adapter("", make("2"))


@both
@virtual
async def test_requests_go_only_where_their_adapter_is(kind: Kind, make: Make) -> None:
    engines = toys(3)
    async with kind(engines) as dispatcher:
        await dispatcher._replicas[1].load_adapter("a", str(make("1")))
        streams = [dispatcher.generate(prompt(number), PARAMS, adapter="a") for number in range(4)]
        await turn()
        assert sent(dispatcher, streams)["local-1"] == 4
        for number, stream in enumerate(streams):
            assert (await stream).token_ids == wanted(number, make("1"))
        stream = dispatcher.generate(prompt(1), ENDLESS, adapter="a")
        await asyncio.sleep(5 * STEP)
        engines[1].lose()
        with pytest.raises(EngineFailed, match="no replica left has its adapter 'a'"):
            await stream


@both
@virtual
async def test_an_output_goes_on_with_the_same_files_only(kind: Kind, make: Make) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
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
        engines[int(attempt_of(lost).replica.name[-1])].lose()
        with pytest.raises(EngineFailed, match="adapter"):
            await lost


@both
@virtual
async def test_requests_that_wait_for_a_replica_get_the_newest_or_an_error(kind: Kind, make: Make) -> None:
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


@virtual
async def test_a_replica_that_is_lost_while_it_loads_does_not_count(make: Make) -> None:
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


@both
@pytest.mark.parametrize("steps", [0.5, 4.5], ids=["before its first token", "behind it"])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "unloaded"])
@virtual
async def test_a_draining_replica_finishes_what_has_an_adapter_that_is_gone(
    kind: Kind, make: Make, replaced: bool, steps: float
) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        streams = [dispatcher.generate(prompt(number), PARAMS, adapter="a") for number in range(2)]
        await asyncio.sleep(steps * STEP)
        assert bool(record(streams[0]).output.token_ids) == (steps > 1)
        if replaced:
            await dispatcher.load_adapter("a", make("2"))
        else:
            await dispatcher.unload_adapter("a")
        await dispatcher.restart("local-0")
        for number, stream in enumerate(streams):
            assert (await stream).token_ids == wanted(number, make("1"))
        assert dispatcher.stats().resumed == 0


def held_by(engines: list[Toy], name: str = "a") -> list[str | None]:
    """The paths that a name stands for in each engine."""
    found = [{each.name: each.path for each in engine.adapters()} for engine in engines]
    return [each.get(name) for each in found]


class Gate:
    """An engine whose loads wait until they may go on."""

    def __init__(self, engine: Toy) -> None:
        self.began, self.open = asyncio.Event(), asyncio.Event()
        self._load = engine.load_adapter
        engine.load_adapter = self._wait  # type: ignore[method-assign]

    async def _wait(self, name: str, path: Any) -> Any:
        self.began.set()
        await self.open.wait()
        return await self._load(name, path)


@both
@virtual
async def test_a_load_that_the_last_replicas_are_lost_in_fails_and_so_do_requests(
    kind: Kind, make: Make
) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        gate = Gate(engines[1])
        load = asyncio.ensure_future(dispatcher.load_adapter("a", make("1")))
        await gate.began.wait()
        await asyncio.sleep(0.5)
        for engine in engines:
            engine.lose()
        gate.open.set()
        await asyncio.wait([load])
        assert isinstance(load.exception(), EngineFailed)
        await asyncio.sleep(0.5)
        assert dispatcher.state is EngineState.FAILED
        with pytest.raises(EngineFailed, match="no replica is left"):
            dispatcher.generate(prompt(1), PARAMS)


@both
@virtual
async def test_where_what_was_replaced_cannot_come_back_the_name_goes(kind: Kind, make: Make) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))

        def refuse(path: Path) -> Any:
            raise ConfigError("no room here")

        def prepare(path: Path) -> Any:
            return ToyAdapter.read(path) if path.name == "of-2" else refuse(path)

        engines[0].device.prepare_adapter = prepare  # type: ignore[method-assign]
        engines[1].device.prepare_adapter = refuse  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="no room here"):
            await dispatcher.load_adapter("a", make("2"))
        assert held_by(engines) == [None, str(make("1"))]
        for number in range(4):
            assert await ask(dispatcher, number) == wanted(number, make("1"))


@both
@pytest.mark.parametrize("before", [True, False], ids=["replaced", "new"])
@virtual
async def test_a_load_that_is_cancelled_is_undone_where_it_was_done(
    kind: Kind, make: Make, before: bool
) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        if before:
            await dispatcher.load_adapter("a", make("1"))
        gate = Gate(engines[1])
        load = asyncio.ensure_future(dispatcher.load_adapter("a", make("2")))
        await gate.began.wait()
        await asyncio.sleep(0.5)
        assert held_by(engines)[0] == str(make("2"))
        load.cancel()
        await asyncio.wait([load])
        assert load.cancelled()
        assert held_by(engines) == [str(make("1")) if before else None] * 2
        gate.open.set()
        assert (await dispatcher.load_adapter("a", make("3"))).path == str(make("3"))
        assert held_by(engines) == [str(make("3"))] * 2


@both
@virtual
async def test_a_replica_that_starts_again_amid_a_load_has_the_adapter(kind: Kind, make: Make) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        gate = Gate(engines[1])
        load = asyncio.ensure_future(dispatcher.load_adapter("a", make("1")))
        await gate.began.wait()
        await asyncio.sleep(0.5)
        await dispatcher.restart("local-0")
        await dispatcher.add(other := Toy())
        gate.open.set()
        await load
        assert held_by([*engines, other]) == [str(make("1"))] * 3


@both
@virtual
async def test_a_replica_that_joins_has_no_name_that_is_unloaded_meanwhile(kind: Kind, make: Make) -> None:
    engines = toys(2)
    async with kind(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        await dispatcher.load_adapter("b", make("2"))
        gate = Gate(engines[0])
        restart = asyncio.ensure_future(dispatcher.restart("local-0"))
        await gate.began.wait()
        await dispatcher.unload_adapter("a")
        await dispatcher.load_adapter("b", make("3"))
        gate.open.set()
        await restart
        assert held_by(engines) == [None, None]
        assert held_by(engines, "b") == [str(make("3"))] * 2
        assert [each.name for each in dispatcher.adapters()] == ["b"]


@both
@virtual
async def test_an_adapter_of_the_config_that_was_unloaded_does_not_come_back(kind: Kind, make: Make) -> None:
    engines = toys(2, adapters=f"a={make('1')}")
    async with kind(engines) as dispatcher:
        await dispatcher.unload_adapter("a")
        await dispatcher.restart("local-0")
        assert held_by(engines) == [None, None]
        assert dispatcher.adapters() == []
