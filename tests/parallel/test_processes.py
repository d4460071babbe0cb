"""Engines in child processes: they start, are lost, come back, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from aioinfer import Engine, EngineConfig, SamplingParams
from aioinfer.errors import ConfigError, EngineError, EngineFailed
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.processes import ProcessReplica, _environment, child_config
from aioinfer.parallel.replica import ReplicaState
from tests.joining import still_running
from tests.parallel.waiting import until
from tests.tiers import PROGRAM, nightly, rest

CONFIG = EngineConfig(model="tiny-chat", deterministic=True, threads=1, kv_memory_gib=0.1)


pytestmark = pytest.mark.usefixtures("directory", "patient")


# -- what a child is told ------------------------------------------------------------------------------


def test_a_child_has_the_settings_of_the_config_and_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioinfer.parallel.processes.usable_cores", lambda: 8)
    config = EngineConfig(model="tiny-chat", max_running_requests=3, kv_memory_gib=1e-6, device="cpu")
    found = child_config(config)
    assert found.pop("download") is False
    assert EngineConfig(**yaml.safe_load(yaml.safe_dump(found))) == config
    assert child_config(EngineConfig(stats_interval=5, tracing=True)) == {"download": False}
    assert child_config(EngineConfig(download=True))["download"] is True

    def threads(config: EngineConfig, children: int) -> int:
        return int(ProcessReplica(config, "it", children=children)._settings["threads"])

    assert threads(config, 3) == 2
    assert threads(EngineConfig(threads=5), 3) == 5
    assert threads(EngineConfig(), 30) == 1


def test_what_no_file_can_hold_is_refused() -> None:
    from aioinfer.scheduling.policy import Policy

    class Own(Policy):
        pass

    with pytest.raises(ConfigError, match="policy must be a name for replicas in other processes"):
        Dispatcher(processes=2, config=EngineConfig(policy=Own))


def test_settings_of_the_environment_do_not_win_over_those_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOINFER_MODEL", "another")
    monkeypatch.setenv("AIOINFER_REPLICA_TOKEN", "x")
    monkeypatch.setenv("AIOINFER_CACHE", "kept")
    found = _environment(CONFIG, 0)
    assert "AIOINFER_MODEL" not in found
    assert "AIOINFER_REPLICA_TOKEN" not in found
    assert found["AIOINFER_CACHE"] == "kept"


@pytest.mark.parametrize(
    ("visible", "number", "device", "expected"),
    [
        ("0,1,2", 4, "auto", "1"),
        ("GPU-a, GPU-b", 1, "cuda", "GPU-b"),
        ("3", 5, "cuda", "3"),
        ("0,1", 1, "cpu", "0,1"),
        ("0,1", 1, "cuda:0", "0,1"),
        ("", 1, "auto", ""),
    ],
)
def test_of_several_gpus_each_child_sees_one_unless_one_is_named(
    visible: str, number: int, device: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _environment(EngineConfig(device=device), number)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"processes": -1}, "processes must be in"),
        ({"processes": 1000}, "processes must be in"),
        ({"processes": True}, "processes must be in"),
        ({"processes": 1, "engines": [Engine()]}, "one of engines, processes and addresses"),
        ({}, "engines must be one or more Engines"),
        ({"config": CONFIG, "engines": [Engine()]}, "config: that of an engine belongs to the engine"),
        ({"addresses": "/a/path"}, "addresses must be a list of texts"),
        ({"addresses": ["nowhere"]}, "address must be HOST:PORT or a path"),
        ({"addresses": ["/a"], "processes": 2}, "one of engines, processes and addresses"),
    ],
)
def test_replicas_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dispatcher(**values)


# -- children that are no replicas ---------------------------------------------------------------------


def program(replica: ProcessReplica, source: str) -> None:
    """Run this in place of aioinfer."""
    replica.command = [sys.executable, "-c", textwrap.dedent(source)]


async def test_a_child_that_ends_is_an_error_with_its_status() -> None:
    replica = ProcessReplica(CONFIG, "it")
    program(replica, "raise SystemExit(3)")
    with pytest.raises(EngineError, match="the replica it has ended with status 3"):
        await replica.launch()
    assert replica.pid is None


async def test_a_start_that_is_cancelled_ends_the_child(directory: Path) -> None:
    """Its directory, which is for its user only, is gone with it."""
    replica = ProcessReplica(CONFIG, "it")
    program(replica, "import time; time.sleep(600)")
    launching = asyncio.ensure_future(replica.launch())
    await until(lambda: replica.pid)
    child = psutil.Process(replica.pid)
    (name,) = os.listdir(directory)
    private = directory / name
    assert private.stat().st_mode & 0o777 == 0o700
    settings = yaml.safe_load((private / "settings.yaml").read_text("utf-8"))
    assert settings["deterministic"] is True
    assert settings["socket"] == str(private / "socket")
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert not child.is_running()


async def test_if_one_child_does_not_start_none_does() -> None:
    dispatcher = Dispatcher(processes=3, config=CONFIG)
    for replica in dispatcher._replicas:
        program(replica, "import time; time.sleep(600)")  # type: ignore[arg-type]
    program(dispatcher._replicas[1], "raise SystemExit(4)")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="process-1 has ended with status 4"):
        await dispatcher.start()
    assert dispatcher.closed


# -- children ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def dispatching(processes: int, **options: Any) -> AsyncIterator[Dispatcher]:
    async with asyncio.timeout(240):
        dispatcher = Dispatcher(processes=processes, config=CONFIG, **options)
        await dispatcher.start()
        try:
            yield dispatcher
        finally:
            await dispatcher.aclose()


def pid_of(replica: Any) -> int:
    assert replica.pid is not None
    return int(replica.pid)


PARAMS = SamplingParams(max_tokens=300, temperature=0.8, seed=11, ignore_eos=True, logprobs=1)


async def _interrupted(dispatcher: Dispatcher, number: signal.Signals) -> tuple[list[int], str, list[Any]]:
    """A stream whose child gets a signal amid it."""
    ids: list[int] = []
    text = ""
    logprobs: list[Any] = []
    hit = False
    # With a lag, so that the child is amid the output when it is hit.
    async for chunk in dispatcher.generate("Once upon a time", PARAMS, max_lag=20):
        ids += chunk.token_ids
        text += chunk.text
        logprobs += chunk.logprobs or ()
        if len(ids) > 30 and not hit:
            hit = True
            (replica,) = [each for each in dispatcher._replicas if each.load.requests]
            os.kill(pid_of(replica), number)
            if number is signal.SIGSTOP:
                silent = asyncio.ensure_future(_silent(replica))
    assert hit
    if number is signal.SIGSTOP:
        await silent
    return ids, text, logprobs


async def _silent(replica: Any) -> None:
    """Two minutes pass in which it is not heard."""
    while replica.state is ReplicaState.READY:
        replica._link.connection.silence = 480
        await asyncio.sleep(0.01)


@rest(PROGRAM)
@pytest.mark.native
async def test_a_stream_goes_on_when_its_process_is_killed_or_hangs() -> None:
    """To the bit; the process that hangs is replaced."""
    async with dispatching(2) as dispatcher:
        expected = await dispatcher.generate("Once upon a time", PARAMS)
        for round_, number in enumerate((signal.SIGSTOP, signal.SIGKILL)):
            found = await _interrupted(dispatcher, number)
            assert found == (expected.token_ids, expected.text, expected.logprobs)
            stats = dispatcher.stats()
            assert (stats.resumed, stats.diverged) == (round_ + 1, 0)
            if number is signal.SIGSTOP:
                await until(lambda: dispatcher.stats().ready_replicas == 2)
        assert dispatcher.tokenizer is not None
        result = await dispatcher.generate([{"role": "user", "content": "What is 17 + 25?"}])
        assert "42" in result.text


@nightly(PROGRAM)
async def test_work_goes_on_when_all_were_lost_and_one_comes_back() -> None:
    async with dispatching(1) as dispatcher:
        stream = dispatcher.generate("Once upon a time", PARAMS)
        await anext(stream)
        os.kill(pid_of(dispatcher._replicas[0]), signal.SIGKILL)
        with pytest.raises(EngineFailed, match="no replica is left: process-0"):
            await stream
        assert not dispatcher.ready
        await until(lambda: dispatcher.ready)
        assert len((await dispatcher.generate("Once upon a time", PARAMS)).token_ids) == 300


@nightly(PROGRAM)
@pytest.mark.parametrize(
    ("factory", "closes"),
    [("asyncio.new_event_loop", (False, True)), ("uvloop.new_event_loop", (False, "only"))],
)
def test_a_dispatcher_that_outlived_its_loop_can_be_used_again(factory: str, closes: tuple[Any]) -> None:
    """In a program of its own: Python says on standard error what the closed loop has left behind."""
    source = f"""
        import asyncio, psutil, uvloop
        from aioinfer import EngineConfig, SamplingParams
        from aioinfer.parallel import Dispatcher

        config = EngineConfig(model="tiny-chat", threads=1, kv_memory_gib=0.1)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        dispatcher = Dispatcher(processes=1, config=config)
        children = []

        async def use_it(close):
            if close != "only":
                await dispatcher.start()
                children.append(psutil.Process(dispatcher._replicas[0].pid))
                assert len((await dispatcher.generate("Once upon a time", params)).token_ids) == 20
            if close:
                await dispatcher.aclose()
                assert dispatcher.closed

        for close in {closes}:
            with asyncio.Runner(loop_factory={factory}) as runner:
                runner.run(use_it(close))
        for child in children:
            child.wait(timeout=120)
        print("they have ended")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "they have ended\n", done.stderr


@nightly(PROGRAM)
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    source = """
        import asyncio, time
        from aioinfer import EngineConfig
        from aioinfer.parallel import Dispatcher

        async def main():
            config = EngineConfig(model="tiny-chat", threads=1, kv_memory_gib=0.1)
            dispatcher = Dispatcher(processes=2, config=config)
            await dispatcher.start()
            print(*(replica.pid for replica in dispatcher._replicas), flush=True)
            time.sleep(600)

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    try:
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
        parent.wait()
        assert not still_running(children)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for directory in tmp_path.glob("aioinfer-*"):  # which nobody was left to remove
            assert [each.name for each in directory.iterdir()] == ["settings.yaml"]
            (directory / "settings.yaml").unlink()
            directory.rmdir()


def _served(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "aioinfer", "replica", "--with-parent", "--socket", str(path)]
    options = ["--deterministic", "true", "--threads", "1", "--kv-memory-gib", "0.1"]
    return subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


@nightly(PROGRAM)
async def test_replicas_that_somebody_else_starts_are_used_while_they_are_there(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    served = [_served(path) for path in paths]
    try:
        async with asyncio.timeout(240):
            dispatcher = Dispatcher(addresses=[*map(str, paths)], config=CONFIG)
            while dispatcher.closed:
                with contextlib.suppress(EngineError):  # they are loading
                    await dispatcher.start()
                await asyncio.sleep(0.1)
            expected = await dispatcher.generate("Once upon a time", PARAMS)
            _end(served[0])
            await until(lambda: dispatcher.stats().ready_replicas == 1)
            assert await dispatcher.generate("Once upon a time", PARAMS) == expected
            served[0] = _served(paths[0])
            await until(lambda: dispatcher.stats().ready_replicas == 2)
            await dispatcher.aclose()
            again = Dispatcher(addresses=[*map(str, paths)], config=CONFIG)
            await again.start()  # they have gone on
            assert await again.generate("Once upon a time", PARAMS) == expected
            await again.aclose()
    finally:
        for process in served:
            _end(process)
