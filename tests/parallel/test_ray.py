"""Replicas on a Ray cluster, with a keeper that only plays one."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioinfer import EngineConfig, ServerConfig
from aioinfer.errors import ConfigError, EngineClosed, EngineError, OutOfMemory
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.launched import HostUnavailable
from aioinfer.parallel.on_ray.cluster import RayCluster
from aioinfer.parallel.on_ray.replica import RayReplica
from aioinfer.parallel.on_ray.resources import Node, share
from aioinfer.parallel.replica import ReplicaState
from aioinfer.parallel.sent_errors import SentError
from tests.parallel.served import toy
from tests.parallel.waiting import started_in, until
from tests.tiers import SECONDS, rest

CONFIG = EngineConfig(model="tiny-chat", deterministic=True, threads=1, kv_memory_gib=0.1)


pytestmark = pytest.mark.usefixtures("directory")


# -- what is asked of a cluster ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "nodes", "replicas", "cpus", "gpus"),
    [
        ({}, [(8, 0)], 3, 2, 0),
        ({}, [(4, 0), (4, 0)], 1, 4, 0),
        ({}, [(5, 0), (5, 0)], 3, 2, 0),
        ({}, [(3, 0), (3, 0)], 2, 3, 0),
        ({}, [(1, 0)], 4, 1, 0),
        ({}, [], 4, 1, 0),
        ({"threads": 3}, [(2, 0)], 1, 3, 0),
        ({}, [(8, 4)], 4, 1, 1),
        ({}, [(8, 0.5), (8, 1)], 1, 1, 1),
        ({}, [(8, 2)], 4, 2, 0),
        ({"device": "cpu"}, [(8, 4)], 4, 2, 0),
        ({"device": "cuda"}, [(8, 0)], 2, 1, 1),
        ({"device": "cuda:3"}, [(8, 4)], 2, 1, 1),
    ],
)
def test_a_replica_gets_a_gpu_or_its_share_of_the_cpus(
    settings: dict[str, Any], nodes: list[tuple[float, float]], replicas: int, cpus: int, gpus: int
) -> None:
    found = share(settings, [Node(*each) for each in nodes], replicas)
    assert (found.cpus, found.gpus) == (cpus, gpus)
    expected = {"device": "cuda"} if gpus else {"threads": cpus}
    assert found.settings == settings | expected


@pytest.mark.parametrize(
    "address", ["", "local", "ray://a:1", "nowhere", ":6379", "a:b", "a:99999", "/a:1", 3]
)
def test_an_address_that_makes_no_sense_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match="ray must be auto or HOST:PORT"):
        Dispatcher(processes=2, ray=address)


def test_how_many_replicas_must_be_said() -> None:
    with pytest.raises(ConfigError, match="ray: processes must be given"):
        Dispatcher(ray="auto")


@pytest.mark.parametrize("found", [None, ModuleSpec("ray", None)], ids=["nothing", "a directory"])
def test_without_ray_it_is_said_what_to_install(
    found: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=r"pip install 'aioinfer\[ray\]'"):
        Dispatcher(processes=2, ray="auto")


def test_the_server_has_its_replicas_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from aioinfer.cli.serving import _engine

    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster.has_ray", lambda: True)
    found = _engine(CONFIG, ServerConfig(ray="127.0.0.1:6379"))
    assert isinstance(found, Dispatcher)
    assert [each.name for each in found._replicas] == ["ray-0"]
    found = _engine(CONFIG, ServerConfig(ray="127.0.0.1:6379", replicas=3))
    assert isinstance(found, Dispatcher)
    assert [each.name for each in found._replicas] == ["ray-0", "ray-1", "ray-2"]


@rest(SECONDS)
def test_nothing_here_imports_ray() -> None:
    source = """
        import sys
        from aioinfer.parallel import Dispatcher
        from aioinfer.parallel.on_ray import cluster
        cluster.has_ray = lambda: True
        Dispatcher(processes=2, ray="auto")
        assert "ray" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)


def test_paths_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors have another working directory; what only looks like a path stays as it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("own", "priority"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster.has_ray", lambda: True)
    config = EngineConfig(model="own", policy="priority", speculation="lookup")
    (replica,) = Dispatcher(processes=1, ray="auto", config=config)._replicas
    assert isinstance(replica, RayReplica)
    assert replica._settings["model"] == str(tmp_path / "own")
    assert replica._settings["policy"] == "priority"


# -- a keeper that only plays one ----------------------------------------------------------------------

#: what each of them has at the beginning
PLAYED = """
    import json, sys, time

    def say(number=-1, **fields):
        print(json.dumps({"number": number, **fields}), flush=True)

    def heard():
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        return json.loads(line)

    assert sys.argv[1:] == ["10.0.0.1:6379"]
    say()
"""
#: writes down what it hears
KEEPING = """
    say()
    while True:
        command = heard()
        print(json.dumps(command), file=sys.stderr, flush=True)
        if "settings" in command:
            say(command["number"], waits=True)
            say(command["number"], host="10.0.0.2", port=7000 + command["actor"], pid=command["actor"])
        else:
            say(command["number"])
"""


def cluster(source: str, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster.has_ray", lambda: True)
    found = RayCluster("10.0.0.1:6379", 2)
    found.command = [sys.executable, "-c", textwrap.dedent(PLAYED) + textwrap.dedent(source)]
    return found


async def refused(found: RayCluster, message: str, kind: type[Exception] = HostUnavailable) -> None:
    actor = found.actor()
    with pytest.raises(kind, match=message):
        await found.place(actor, {}, "secret")
    await found.end(actor, kill=True)
    assert found._starting is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("say(why='nobody is there')", r"no Ray cluster at 10\.0\.0\.1:6379: nobody is there"),
        ("raise SystemExit(3)", "keeper of replicas on Ray has ended"),
        ("say(); heard(); raise SystemExit(3)", "keeper of replicas on Ray has ended"),
        ("print('x')", "keeper of replicas on Ray says b'x"),
        ("say(); heard(); print('x' * 2000000); heard()", "keeper of replicas on Ray says b''"),
        ("say(); heard(); say(0, host=7); heard()", r"Expected `str`, got `int` - at `\$.host`"),
    ],
)
async def test_a_keeper_that_ends_or_makes_no_sense_is_an_error(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await refused(cluster(source, monkeypatch), message)


@rest(SECONDS)
async def test_a_cluster_that_does_not_answer_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._CONNECTING", 0.1)
    await refused(cluster("time.sleep(600)", monkeypatch), "no answer of a Ray cluster")


async def test_a_keeper_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster("", monkeypatch)
    found.command = ["/nowhere"]
    await refused(found, "cannot be started", EngineError)


def sent(error: Exception) -> Any:
    return msgspec.to_builtins(SentError.of(error))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ({"why": "its node is gone"}, HostUnavailable, "its actor has died: its node is gone"),
        ({"error": sent(ConfigError("no such model"))}, ConfigError, "no such model"),
        ({"error": sent(OutOfMemory("too large"))}, OutOfMemory, "too large"),
        ({"error": sent(KeyError("odd"))}, EngineError, "KeyError: 'odd'"),
    ],
)
async def test_what_dies_before_it_is_placed_is_an_error(
    answer: dict[str, Any], kind: type[EngineError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its engine, if it is that; another start may find another node otherwise."""
    source = f"""
        say()
        while True:
            command = heard()
            say(command["number"], **({answer!r} if "settings" in command else {{}}))
    """
    await refused(cluster(source, monkeypatch), message, kind)


async def test_replicas_are_placed_and_ended_by_one_keeper(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = cluster(KEEPING, monkeypatch)
    actors = [found.actor(), found.actor()]
    with caplog.at_level(logging.WARNING):
        placed = await asyncio.gather(
            *(found.place(each, {"threads": each}, f"secret {each}") for each in actors)
        )
    assert [(each.host, each.port, each.pid) for each in placed] == [
        ("10.0.0.2", 7000 + each, each) for each in actors
    ]
    paths = [Path(found.path(each)) for each in actors]
    assert paths[0].parent.stat().st_mode & 0o777 == 0o700
    assert "a replica waits for a place in the Ray cluster" in caplog.text
    await found.end(actors[0], kill=False)
    assert found._starting is not None
    await asyncio.gather(*(found.end(actors[1], kill=True) for _ in range(2)))
    assert found._starting is None
    heard = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(each["actor"], "settings" in each, each.get("kill", False)) for each in heard] == [
        (0, True, False), (1, True, False), (0, False, False), (1, False, True),
    ]  # fmt: skip
    assert heard[1].items() >= {
        "settings": {"threads": 1}, "token": "secret 1", "path": str(paths[1]), "replicas": 2,
    }.items()  # fmt: skip


async def test_a_keeper_that_was_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster(KEEPING, monkeypatch)
    first, second = found.actor(), found.actor()
    for actor in (first, second):
        await found.place(actor, {}, "secret")
    assert found._starting is not None
    keeper = found._starting.result()
    keeper.child.kill()
    await until(lambda: not keeper.alive)
    await found.end(first, kill=True)
    third = found.actor()
    assert (await found.place(third, {}, "secret")).host == "10.0.0.2"
    await found.end(second, kill=True)
    await found.end(third, kill=True)
    assert found._starting is None


@rest(SECONDS)
async def test_a_keeper_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._AT_ONCE", 0.1)
    source = "say(); say(heard()['number'], host='10.0.0.2', port=7000, pid=1); time.sleep(600)"
    found = cluster(source, monkeypatch)
    actor = found.actor()
    await found.place(actor, {}, "secret")
    await found.end(actor, kill=True)
    assert "a replica on Ray does not end" in caplog.text
    assert found._starting is None


@pytest.mark.parametrize("source", ["time.sleep(600)", "say()\nwhile True: heard()"], ids=["start", "place"])
async def test_a_placement_that_is_cancelled_leaves_nothing(
    source: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._AT_ONCE", 0.1)
    found = cluster(source, monkeypatch)
    actor = found.actor()
    placing = asyncio.ensure_future(found.place(actor, {}, "secret"))
    await until(lambda: started_in(directory))
    if source != "time.sleep(600)":
        await until(lambda: found._actors[actor] is not None)
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    await found.end(actor, kill=True)
    assert found._starting is None


async def test_the_last_end_and_a_new_placement_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = cluster(KEEPING, monkeypatch)
    first = found.actor()
    await found.place(first, {}, "secret")
    ending = asyncio.ensure_future(found.end(first, kill=False))
    others, placed = [], []
    for _ in range(3):
        others.append(found.actor())
        placed.append(asyncio.ensure_future(found.place(others[-1], {}, "secret")))
        await asyncio.sleep(0)
    await ending
    await asyncio.gather(*placed)
    for each in others:
        assert Path(found.path(each)).parent.is_dir()
    await asyncio.gather(*(found.end(each, kill=True) for each in others))
    assert found._starting is None


# -- its dispatcher ------------------------------------------------------------------------------------


@rest(SECONDS)
async def test_a_dispatcher_is_closed_while_a_replica_waits_for_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts as one that is about to be there meanwhile, and whoever restarts it is told."""
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._AT_ONCE", 0.1)
    waits: Any = cluster("say()\nwhile True: heard()", monkeypatch)
    dispatcher = Dispatcher([toy(), toy()])
    await dispatcher.start()
    replica: Any = RayReplica(waits, EngineConfig(), "local-0")
    replica.state = ReplicaState.LOST
    local, dispatcher._replicas[0] = dispatcher._replicas[0], replica
    assert dispatcher._running is not None
    dispatcher._running.placing.replicas[0] = replica
    restarting = asyncio.ensure_future(dispatcher.restart("local-0"))
    await until(lambda: waits._starting and waits._starting.done())
    assert replica.state is ReplicaState.STARTING
    assert dispatcher._running.placing.alive
    await dispatcher.aclose()
    with pytest.raises(EngineClosed):
        await restarting
    assert waits._starting is None
    await local.aclose()


async def test_a_dispatcher_without_a_cluster_does_not_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its replicas wait for one keeper."""
    starts = directory / "starts"
    played: Any = cluster(f"open({str(starts)!r}, 'a').write('x'); say(why='no')", monkeypatch)
    dispatcher = Dispatcher(processes=3, ray="10.0.0.1:6379", config=CONFIG)
    for replica in dispatcher._replicas:
        replica._cluster = played  # type: ignore[attr-defined]
    with pytest.raises(HostUnavailable, match="no Ray cluster"):
        await dispatcher.start()
    assert dispatcher.closed
    assert starts.read_text() == "x"
