"""Adapters of replicas that did not have the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioinfer import SamplingParams
from aioinfer.errors import ConfigError, EngineFailed
from aioinfer.parallel import Dispatcher, RoutingPolicy
from aioinfer.parallel.agent import Agent
from aioinfer.parallel.policies import Candidate
from aioinfer.parallel.replica import Replica
from tests.parallel.framed import FramedReplica, Kind, both, framed
from tests.parallel.test_adapters import Make, ask, held_by, make, wanted
from tests.parallel.toys import PARAMS, STEP, Toy, attempt_of, expected, prompt, record, sent, toys, virtual
from tests.toys.adapters import ToyAdapter

__all__ = ["make"]

LONG = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)


@both
@virtual
async def test_replicas_have_the_same_adapters_from_the_start(kind: Kind, make: Make) -> None:
    settings = ("a={1}", "a={2},b={3}", "b={1},c={2}")
    paths = {str(number): make(str(number)) for number in (1, 2, 3)}
    engines = [
        Toy(adapters=",".join(part.format("", *paths.values()) for part in each.split(",")))
        for each in settings
    ]
    async with kind(engines) as dispatcher:
        for name, number in (("a", 1), ("b", 3), ("c", 2)):
            assert held_by(engines, name) == [str(paths[str(number)])] * 3
        assert [each.name for each in dispatcher.adapters()] == ["a", "b", "c"]
        for number in range(3):
            assert await ask(dispatcher, number) == wanted(number, make("1"))


@both
@virtual
async def test_a_name_that_stands_for_other_files_in_a_replica_is_unloaded_there(
    kind: Kind, make: Make
) -> None:
    engines = [Toy(adapters=f"a={make(name)}") for name in ("1", "2")]
    await engines[1].start()

    def refuse(path: Path) -> Any:
        raise ConfigError("there is no such directory here")

    engines[1].device.prepare_adapter = refuse  # type: ignore[method-assign]
    dispatcher = kind(engines)
    if kind is framed:
        dispatcher._replicas[1].agent = Agent(engines[1], token="a token")  # type: ignore[attr-defined]
    async with dispatcher:
        assert held_by(engines) == [str(make("1")), None]
        for number in range(4):
            assert await ask(dispatcher, number) == wanted(number, make("1"))


async def replaced_on_the_way(dispatcher: Dispatcher, engine: Toy, path: Path) -> FramedReplica:
    """An engine has loaded another adapter in its own process, and nobody knows it: what it says is held."""
    replica = dispatcher._replicas[0]
    assert isinstance(replica, FramedReplica)
    await asyncio.sleep(STEP)
    replica.sockets[1].held = True
    await engine.load_adapter("a", path)
    return replica


@virtual
async def test_an_output_is_of_the_adapter_that_has_computed_it(make: Make) -> None:
    engines = toys(2)
    async with framed(engines) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        replica = await replaced_on_the_way(dispatcher, engines[0], make("2"))
        stream = dispatcher.generate(prompt(0), PARAMS, adapter="a")
        await asyncio.sleep(4 * STEP)
        assert attempt_of(stream).replica is replica
        replica.sockets[1].release()
        while not record(stream).output.token_ids:
            await asyncio.sleep(STEP / 10)
        (info,) = engines[0].adapters()
        assert record(stream).output.adapter_fingerprint == info.fingerprint == replica.fingerprint_of("a")
        engines[0].lose()
        with pytest.raises(EngineFailed, match="no replica left has its adapter 'a'"):
            await stream


@virtual
async def test_a_replica_tells_of_adapters_that_its_own_process_loads(make: Make) -> None:
    engines = toys(2)
    async with framed(engines) as dispatcher:
        await engines[1].load_adapter("a", make("1"))
        await asyncio.sleep(STEP)
        assert [each.name for each in dispatcher.adapters()] == ["a"]
        for number in range(2):
            assert await ask(dispatcher, number) == wanted(number, make("1"))
        await engines[1].unload_adapter("a")
        await asyncio.sleep(STEP)
        assert dispatcher.adapters() == []


class Preferring(RoutingPolicy):
    """The first one in an order of names."""

    order = ("local-0", "local-1", "local-2")

    def choose(self, record: Any, candidates: Sequence[Candidate]) -> Replica:
        return min(candidates, key=lambda each: self.order.index(each.replica.name)).replica


@pytest.mark.parametrize(
    ("begun", "unloaded"),
    [(True, True), (True, False), (False, True)],
    ids=["begun, unloaded", "begun, replaced", "new, unloaded"],
)
@virtual
async def test_what_comes_to_a_replica_too_late_for_its_adapter_goes_to_another_one(
    make: Make, begun: bool, unloaded: bool
) -> None:
    engines, policy = toys(3), Preferring()
    async with framed(engines, policy=policy) as dispatcher:
        await dispatcher.load_adapter("a", make("1"))
        if begun:
            policy.order = ("local-1", "local-0", "local-2")
            stream = dispatcher.generate(prompt(0), LONG, adapter="a")
            await asyncio.sleep(3.5 * STEP)
            assert sent(dispatcher, [stream])["local-1"]
        replica = await replaced_on_the_way(dispatcher, engines[0], make("2"))
        if unloaded:
            await engines[0].unload_adapter("a")
        if begun:
            engines[1].lose()
        else:
            stream = dispatcher.generate(prompt(0), LONG, adapter="a")
        await asyncio.sleep(3.5 * STEP)
        assert sent(dispatcher, [stream])["local-0"]
        replica.sockets[1].release()
        assert (await stream).token_ids == expected(prompt(0), LONG, ToyAdapter.read(make("1")).key)
