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
from tests.parallel.waiting import until

CONFIG = EngineConfig(model="tiny-chat")


class Restarts:
    """A dispatcher that counts restarts, which fail."""

    def __init__(self, replica: SocketReplica | None = None) -> None:
        self.replica = replica or ProcessReplica(CONFIG, "it")
        self.count = 0
        self.delays: list[float] = []
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
        self.lose()
        raise EngineError("no")


@virtual
async def test_a_replica_is_started_later_each_time_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioinfer.parallel.supervisor._BACKOFF", 0.05)
    restarts = Restarts()
    restarts.lose()
    await until(lambda: "it stays down" in caplog.text)
    assert restarts.count == 2
    assert restarts.delays == pytest.approx([0.05, 0.1])
    assert not restarts.supervisor._timers
    await restarts.supervisor.aclose()


def works(restarts: Restarts) -> None:
    restarts.replica.completed = 1


def is_of_another_program(restarts: Restarts) -> None:
    restarts.replica = SocketReplica("/nowhere", "it")


def waits_for_its_host(restarts: Restarts) -> None:
    restarts.replica.cause = HostUnavailable("there is no cluster")


@pytest.mark.parametrize("prepare", [works, is_of_another_program, waits_for_its_host])
@virtual
async def test_some_replicas_are_started_for_as_long_as_it_takes(
    prepare: Callable[[Restarts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioinfer.parallel.supervisor._BACKOFF", 0.001)
    monkeypatch.setattr("aioinfer.parallel.supervisor._LONGEST", 0.004)
    restarts = Restarts()
    prepare(restarts)
    restarts.lose()
    await until(lambda: restarts.count > 8)
    assert max(restarts.delays) <= (0.0011 if prepare is works else 0.005)
    await restarts.supervisor.aclose()
    count = restarts.count
    await asyncio.sleep(0.02)
    assert restarts.count == count


@virtual
async def test_a_replica_that_is_lost_twice_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has tried to restart it meanwhile."""
    monkeypatch.setattr("aioinfer.parallel.supervisor._BACKOFF", 0.005)
    restarts = Restarts()
    restarts.lose()
    restarts.lose()
    restarts.lose = lambda: None  # type: ignore[method-assign]
    await until(lambda: restarts.count)
    await asyncio.sleep(0.02)
    assert restarts.count == 1
    await restarts.supervisor.aclose()


@virtual
async def test_a_replica_that_somebody_has_restarted_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.parallel.supervisor._BACKOFF", 0.005)
    restarts = Restarts()
    restarts.lose()
    restarts.replica.state = ReplicaState.READY
    await until(lambda: not restarts.supervisor._timers)
    assert not restarts.count
    await restarts.supervisor.aclose()


@virtual
async def test_failures_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.parallel.supervisor._BACKOFF", 0.001)
    monkeypatch.setattr("aioinfer.parallel.supervisor._WINDOW", 0.0)
    restarts = Restarts()
    restarts.lose()
    await until(lambda: restarts.count > 5)
    await restarts.supervisor.aclose()
    count = restarts.count
    await asyncio.sleep(0.02)
    assert restarts.count == count
