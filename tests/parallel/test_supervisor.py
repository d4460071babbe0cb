"""The supervisor: when it starts replicas again that were lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from aioinfer import EngineConfig
from aioinfer.errors import EngineError
from aioinfer.parallel.launched import HostUnavailable
from aioinfer.parallel.processes import ProcessReplica
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import ReplicaState
from aioinfer.parallel.supervisor import Supervisor
from tests.parallel.toys import virtual


class Restarts:
    """A dispatcher that counts restarts, which take a while and fail."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.replica: SocketReplica = ProcessReplica(EngineConfig(model="tiny-chat"), "it")
        self.seconds = seconds
        self.delays: list[float] = []
        self.count = 0
        self.supervisor = Supervisor(self.restart)

    def lose(self) -> None:
        self.replica.state = ReplicaState.LOST
        self.supervisor.lost(self.replica)
        timer = self.supervisor._timers.get("it")
        if timer is not None:
            self.delays.append(timer.when() - asyncio.get_running_loop().time())

    async def restart(self, name: str) -> None:
        assert name == "it"
        self.count += 1
        await asyncio.sleep(self.seconds)
        self.lose()
        raise EngineError("no")


@virtual
async def test_a_replica_is_started_later_each_time_for_as_long_as_it_takes() -> None:
    restarts = Restarts()
    restarts.lose()
    await asyncio.sleep(100)
    assert restarts.delays == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30])
    await asyncio.sleep(1000)
    assert restarts.delays[10:] == pytest.approx([30] * (len(restarts.delays) - 10))
    assert restarts.count >= 40
    await restarts.supervisor.aclose()


def works(restarts: Restarts) -> None:
    restarts.replica.completed = 1


def fails_slowly(restarts: Restarts) -> None:
    restarts.seconds = 100.0


def is_of_another_program(restarts: Restarts) -> None:
    restarts.replica = SocketReplica("/nowhere", "it")


def waits_for_its_host(restarts: Restarts) -> None:
    restarts.replica.cause = HostUnavailable("there is no cluster")


@pytest.mark.parametrize(
    ("prepare", "most"),
    [(works, 0.25), (fails_slowly, 0.25), (is_of_another_program, 30.0), (waits_for_its_host, 30.0)],
)
@virtual
async def test_some_replicas_are_started_for_as_long_as_it_takes(
    prepare: Callable[[Restarts], None], most: float
) -> None:
    restarts = Restarts()
    prepare(restarts)
    restarts.lose()
    await asyncio.sleep(1000)
    assert restarts.count >= 9
    assert max(restarts.delays) == pytest.approx(most)
    await restarts.supervisor.aclose()
    count = restarts.count
    await asyncio.sleep(1000)
    assert restarts.count == count


@virtual
async def test_a_replica_that_was_restarted_meanwhile_is_not_started_by_earlier_losses() -> None:
    restarts = Restarts()
    restarts.lose()
    restarts.lose()
    restarts.lose = lambda: None  # type: ignore[method-assign]
    await asyncio.sleep(10)
    assert restarts.count == 1
    again = Restarts()
    again.lose()
    again.replica.state = ReplicaState.READY
    await asyncio.sleep(10)
    assert not again.count
    for each in (restarts, again):
        await each.supervisor.aclose()
