"""Adapters of replicas that did not have the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aioinfer.errors import ConfigError
from aioinfer.parallel.agent import Agent
from tests.parallel.test_adapters import Kind, Make, ask, both, framed, held_by, make, run, wanted
from tests.parallel.toys import Toy, toys

__all__ = ["make"]


@both
def test_files_that_differ_between_the_replicas_are_refused(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = toys(2)
        async with kind(engines) as dispatcher:
            await dispatcher.load_adapter("a", make("1"))
            elsewhere, load = make("3"), engines[1].load_adapter

            async def other(name: str, path: Any) -> Any:
                if path != str(make("2")):
                    return await load(name, path)
                return dataclasses.replace(await load(name, elsewhere), path=path)

            engines[1].load_adapter = other  # type: ignore[method-assign]
            with pytest.raises(ConfigError, match="adapter 'a': its files differ between the replicas"):
                await dispatcher.load_adapter("a", make("2"))
            assert held_by(engines) == [str(make("1"))] * 2
            for number in range(4):
                assert await ask(dispatcher, number) == wanted(number, make("1"))

    run(work)


@both
def test_replicas_have_the_same_adapters_from_the_start(kind: Kind, make: Make) -> None:
    async def work() -> None:
        settings = ("a={1}", "a={2},b={3}", "b={1},c={2}")
        paths = {str(number): make(str(number)) for number in (1, 2, 3)}
        engines = [
            Toy(adapters=",".join(part.format("", *paths.values()) for part in each.split(",")))
            for each in settings
        ]
        async with kind(engines, policy="round_robin") as dispatcher:
            for name, number in (("a", 1), ("b", 3), ("c", 2)):
                assert held_by(engines, name) == [str(paths[str(number)])] * 3
            assert [each.name for each in dispatcher.adapters()] == ["a", "b", "c"]
            for number in range(3):
                assert await ask(dispatcher, number) == wanted(number, make("1"))

    run(work)


@both
def test_a_name_that_stands_for_other_files_in_a_replica_is_unloaded_there(kind: Kind, make: Make) -> None:
    async def work() -> None:
        engines = [Toy(adapters=f"a={make(name)}") for name in ("1", "2")]
        await engines[1].start()

        def refuse(path: Path) -> Any:
            raise ConfigError("there is no such directory here")

        engines[1].device.prepare_adapter = refuse  # type: ignore[method-assign]
        dispatcher = kind(engines, policy="round_robin")
        if kind is framed:
            dispatcher._replicas[1].agent = Agent(engines[1], token="a token")  # type: ignore[attr-defined]
        async with dispatcher:
            assert held_by(engines) == [str(make("1")), None]
            for number in range(4):
                assert await ask(dispatcher, number) == wanted(number, make("1"))

    run(work)
