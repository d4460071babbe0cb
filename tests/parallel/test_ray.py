"""Replicas on a Ray cluster, with a keeper that only plays one."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioinfer import EngineConfig, ServerConfig
from aioinfer.errors import ConfigError, EngineError
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.launched import HostUnavailable
from aioinfer.parallel.on_ray.cluster import Placed, RayCluster
from aioinfer.parallel.on_ray.resources import Node, share
from tests.parallel.waiting import until

CONFIG = EngineConfig(model="tiny-chat", deterministic=True, threads=1, kv_memory_gib=0.1)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where directories of clusters are, which are gone afterwards, as keepers are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    yield tmp_path
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("aioinfer-")]
    left = [each for each in psutil.Process().children(recursive=True) if each not in before]
    assert not left, left


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


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'aioinfer\[ray\]'"):
        Dispatcher(processes=2, ray="auto")


def test_the_server_has_its_replicas_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from aioinfer.cli.serving import _engine

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = _engine(CONFIG, ServerConfig(ray="127.0.0.1:6379"))
    assert isinstance(found, Dispatcher)
    assert [each.name for each in found._replicas] == ["ray-0"]
    found = _engine(CONFIG, ServerConfig(ray="127.0.0.1:6379", replicas=3))
    assert isinstance(found, Dispatcher)
    assert [each.name for each in found._replicas] == ["ray-0", "ray-1", "ray-2"]


def test_nothing_here_imports_ray() -> None:
    source = """
        import importlib.util, sys
        importlib.util.find_spec = lambda name: object()
        from aioinfer.parallel import Dispatcher
        Dispatcher(processes=2, ray="auto")
        assert "ray" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)


# -- a keeper that only plays one ----------------------------------------------------------------------

#: what each of them has at the beginning
PLAYED = """
    import json, sys, time

    def say(event, **fields):
        print(json.dumps({"event": event, **fields}), flush=True)

    def heard():
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        return json.loads(line)

    assert sys.argv[1:] == ["10.0.0.1:6379"]
"""


def cluster(source: str, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = RayCluster("10.0.0.1:6379", 2)
    found.command = [sys.executable, "-c", textwrap.dedent(PLAYED) + textwrap.dedent(source)]
    return found


async def refused(found: RayCluster, message: str, kind: type[EngineError] = HostUnavailable) -> None:
    with pytest.raises(kind, match=message):
        await found.place(0, {}, "secret", print)
    await found.end(0, kill=True)


async def test_without_a_cluster_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster("say('imported'); say('unreachable', why='nobody is there')", monkeypatch)
    await refused(found, r"no Ray cluster at 10\.0\.0\.1:6379: nobody is there")


async def test_a_cluster_that_does_not_answer_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._CONNECTING", 0.1)
    found = cluster("say('imported'); time.sleep(600)", monkeypatch)
    await refused(found, "no answer of a Ray cluster")


async def test_a_keeper_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    await refused(cluster("raise SystemExit(3)", monkeypatch), "the keeper of replicas on Ray has ended")
    source = "say('imported'); say('connected'); heard(); raise SystemExit(3)"
    await refused(cluster(source, monkeypatch), "the keeper of replicas on Ray has ended")


async def test_a_keeper_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster("", monkeypatch)
    found.command = ["/nowhere"]
    await refused(found, "cannot be started", EngineError)


async def test_what_dies_before_it_is_placed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        say('imported'); say('connected')
        while True:
            command = heard()
            say('ended' if command['do'] == 'end' else 'died', number=command['number'], why='no such model')
    """
    await refused(cluster(source, monkeypatch), "its actor has died: no such model", EngineError)


#: writes down what it hears; replica 1 dies when replica 0 ends
KEEPING = """
    say('imported'); say('connected')
    while True:
        command = heard()
        number = command['number']
        print(json.dumps(command), file=sys.stderr, flush=True)
        if command['do'] == 'place':
            say('waiting', number=number)
            say('placed', number=number, host='10.0.0.2', port=7000 + number, pid=number)
        else:
            say('ended', number=number)
            say('died', number=1, why='it was killed')
"""


async def test_replicas_are_placed_and_ended_by_one_keeper(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = cluster(KEEPING, monkeypatch)
    died: list[str] = []
    with caplog.at_level(logging.WARNING):
        placed = await asyncio.gather(
            *(found.place(number, {"threads": number}, f"secret {number}", died.append) for number in (0, 1))
        )
    assert placed == [
        Placed("10.0.0.2", 7000 + n, n, str(Path(placed[0].path).parent / str(n))) for n in (0, 1)
    ]
    assert Path(placed[0].path).parent.stat().st_mode & 0o777 == 0o700
    assert "a replica waits for a place in the Ray cluster" in caplog.text
    assert not died
    await found.end(0, kill=False)
    await until(lambda: died)
    assert died == ["it was killed"]
    assert found._process is not None
    await found.end(1, kill=True)
    await found.end(1, kill=True)
    assert found._process is None
    heard = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(each["do"], each["number"]) for each in heard] == [
        ("place", 0), ("place", 1), ("end", 0), ("end", 1),
    ]  # fmt: skip
    assert heard[1] == {
        "do": "place", "number": 1, "settings": {"threads": 1}, "token": "secret 1", "path": placed[1].path,
        "replicas": 2,
    }  # fmt: skip
    assert heard[2]["kill"] is False


async def test_a_keeper_that_was_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster(KEEPING, monkeypatch)
    await found.place(0, {}, "secret", print)
    await found.place(1, {}, "secret", print)
    assert found._process is not None
    found._process.kill()
    await until(lambda: found._reading is None or found._reading.done())
    await found.end(0, kill=True)
    assert (await found.place(0, {}, "secret", print)).port == 7000
    await found.end(1, kill=True)
    await found.end(0, kill=True)


async def test_a_keeper_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._FAREWELL", 0.1)
    source = """
        say('imported'); say('connected')
        say('placed', number=heard()['number'], host='10.0.0.2', port=7000, pid=1)
        time.sleep(600)
    """
    found = cluster(source, monkeypatch)
    await found.place(0, {}, "secret", print)
    await found.end(0, kill=True)
    assert "a replica on Ray does not end" in caplog.text
    assert "the keeper of replicas on Ray does not end, and is killed" in caplog.text


async def test_a_placement_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster("say('imported'); say('connected')\nwhile True: heard()", monkeypatch)
    placing = asyncio.ensure_future(found.place(0, {}, "secret", print))
    await until(lambda: found._reading)
    placing.cancel()
    await asyncio.wait([placing])
    monkeypatch.setattr("aioinfer.parallel.on_ray.cluster._FAREWELL", 0.1)
    await found.end(0, kill=True)
    assert found._process is None


async def test_a_dispatcher_without_a_cluster_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    dispatcher = Dispatcher(processes=3, ray="10.0.0.1:6379", config=CONFIG)
    played: Any = cluster("say('imported'); say('unreachable', why='no')", monkeypatch)
    for replica in dispatcher._replicas:
        replica._cluster = played  # type: ignore[attr-defined]
    with pytest.raises(HostUnavailable, match="no Ray cluster"):
        await dispatcher.start()
    assert dispatcher.closed
