"""A start can be cancelled wherever it waits, and again while it closes what it has begun."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.execution.device import DeviceInfo, Progress
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.loop import factory
from aioinfer.native import bindings
from aioinfer.params import SamplingParams
from tests.engine.conftest import OwnThreads
from tests.joining import still_alive
from tests.native.compilers import alive
from tests.tiers import PROGRAM, SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
#: where a start waits for another thread, in order
STAGES = ["import", "open", "tokenizer", "defaults"]


class Stage:
    """Blocks the thread that enters it until it is left, and tells the loop that it was entered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.leave = threading.Event()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.leave.wait(60)


class SlowDevice(ToyDevice):
    """Its opening blocks once; ``asks``: it calls its progress all the while, as one does that compiles."""

    def __init__(self, stage: Stage | None, *, asks: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._stage, self._asks = stage, asks
        self.closed = 0

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        stage, self._stage = self._stage, None
        if stage is not None and not self._asks:
            stage()
        elif stage is not None:
            stage.leave.set()
            stage()
            assert progress is not None
            while True:
                progress("kernels", 0, 1)
        return super().open(progress)

    def close(self) -> None:
        self.closed += 1
        super().close()


def engine_that_waits(stage: Stage, where: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, SlowDevice]:
    """Once, there; a second start goes through."""
    used = False

    def wait(at: str) -> None:
        nonlocal used
        if at == where and not used:
            used = True
            stage()

    def tokenizer(config: EngineConfig) -> ToyTokenizer:
        wait("tokenizer")
        return ToyTokenizer()

    def slow(at: str, real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            wait(at)
            return real(*arguments)

        return call

    monkeypatch.setattr(factory, "import_parts", slow("import", factory.import_parts))
    monkeypatch.setattr(factory, "default_params", slow("defaults", factory.default_params))
    device = SlowDevice(stage if where.startswith("open") else None, asks=where == "open and ask")
    config = EngineConfig(model="toy", page_size=4, num_pages=64, max_running_requests=8)
    return Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=tokenizer), device


async def works(engine: Engine) -> None:
    """A later start."""
    async with engine:
        assert (await engine.generate([1, 2, 3], SHORT)).token_ids == toy_generate([1, 2, 3], SHORT)


@pytest.mark.parametrize("where", [*STAGES, "open and ask"])
async def test_a_cancelled_start_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, where: str, own_threads: OwnThreads
) -> None:
    tasks, stage = asyncio.all_tasks(), Stage()
    engine, device = engine_that_waits(stage, where, monkeypatch)
    starting = asyncio.create_task(engine.start())
    await stage.entered.wait()
    starting.cancel()
    stage.leave.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.state is EngineState.CLOSED
    assert own_threads() == []
    assert asyncio.all_tasks() == tasks
    assert device.closed == (where != "import")
    await works(engine)


@pytest.mark.parametrize("where", STAGES)
async def test_a_start_that_is_cancelled_twice_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, where: str, own_threads: OwnThreads
) -> None:
    """Whatever it waits for. What blocks ends in the background, and a later start waits for that."""
    tasks, stage = asyncio.all_tasks(), Stage()
    engine, device = engine_that_waits(stage, where, monkeypatch)
    starting = asyncio.create_task(engine.start())
    await stage.entered.wait()
    starting.cancel()
    while engine._leaving is None:
        await asyncio.sleep(0)
    assert engine.state is EngineState.STARTING
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.state is EngineState.CLOSED
    assert not engine._leaving.done()
    again = asyncio.create_task(works(engine))
    stage.leave.set()
    await again
    assert [name for name in own_threads() if "text" not in name] == []
    assert asyncio.all_tasks() == tasks
    assert device.closed == 1 + (where != "import")


async def test_a_start_that_waits_for_an_earlier_one_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks, stage = asyncio.all_tasks(), Stage()
    engine, _ = engine_that_waits(stage, "open", monkeypatch)
    leaving: list[Any] = []
    for _ in range(3):
        starting = asyncio.create_task(engine.start())
        if engine._leaving is None:
            await stage.entered.wait()
        for _ in range(2):
            starting.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert engine.state is EngineState.CLOSED
        leaving.append(engine._leaving)
    assert leaving == leaving[:1] * 3
    stage.leave.set()
    await works(engine)
    assert asyncio.all_tasks() == tasks


async def test_cancellation_after_any_number_of_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, own_threads: OwnThreads
) -> None:
    """Once and twice, after 0, 1, 2 .. turns, until the start is quicker."""
    tasks = asyncio.all_tasks()
    for times in (1, 2):
        turns, started = 0, False
        while not started:
            own = own_threads.threads()
            assert not still_alive(own)
            engine, _ = engine_that_waits(Stage(), "nowhere", monkeypatch)
            starting = asyncio.create_task(engine.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            for _ in range(times):
                starting.cancel()
                await asyncio.sleep(0)
            try:
                await starting
                started = True
            except asyncio.CancelledError:
                assert engine.state in (EngineState.NEW, EngineState.CLOSED)
                if engine._leaving is not None:
                    await asyncio.wait([engine._leaving])
                assert own_threads() == []
            await engine.aclose()
            turns = 2 * turns + 1
        assert asyncio.all_tasks() - {starting} == tasks


async def test_a_start_that_fails_while_it_is_cancelled_is_closed(
    monkeypatch: pytest.MonkeyPatch, own_threads: OwnThreads
) -> None:
    class Broken(SlowDevice):
        def open(self, progress: Progress | None = None) -> DeviceInfo:
            super().open(progress)
            raise OSError("broken")

    stage = Stage()
    engine, _ = engine_that_waits(stage, "open", monkeypatch)
    device = Broken(stage)
    engine._make_launcher = lambda _: ThreadLauncher(device)
    starting = asyncio.create_task(engine.start())
    await stage.entered.wait()
    starting.cancel()
    stage.leave.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(OSError, match="broken"):
        await engine.start()
    assert engine.state is EngineState.CLOSED
    assert (own_threads(), device.closed) == ([], 2)


@rest(SECONDS)
async def test_a_start_that_compiles_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_threads: OwnThreads
) -> None:
    """The compilers end with it, and their files are removed."""
    workers, script, cache = tmp_path / "workers", tmp_path / "c++", tmp_path / "cache"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ >> "{workers}"; exec sleep 100\n')
    script.chmod(0o755)
    monkeypatch.setenv("AIOINFER_CXX", str(script))
    monkeypatch.setenv("AIOINFER_CACHE", str(cache))
    monkeypatch.setattr(bindings, "_loaded", None)
    engine, loop = Engine(EngineConfig(device="cpu", threads=1)), asyncio.get_running_loop()

    def progress(stage: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(began.set)

    began = asyncio.Event()
    starting = asyncio.create_task(engine.start(progress))
    await began.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.state is EngineState.CLOSED
    assert own_threads() == []
    assert list(cache.iterdir()) == []
    assert bindings._loaded is None
    for worker in workers.read_text().split() if workers.exists() else []:
        while alive(int(worker)):
            pass


@rest(PROGRAM)
@pytest.mark.linux
def test_nothing_is_imported_on_the_loops_thread_when_an_engine_starts() -> None:
    """Imports of numpy, torch and transformers take seconds. Torch's libraries are loaded before its import,
    which keeps the interpreter's lock while it loads them."""
    code = """if True:
        import asyncio, sys, threading
        from aioinfer import Engine, EngineConfig

        class Finder:
            watched, imports = [], []

            def find_spec(self, name, path=None, target=None):
                if threading.current_thread() is threading.main_thread():
                    self.watched.append(name)
                frame, names = sys._getframe(), set()
                while frame := frame.f_back:
                    names.add(frame.f_globals.get("__name__"))
                # Not where its libraries are looked for, or whether it is installed.
                if name == "torch" and "importlib.util" not in names:
                    with open("/proc/self/maps") as maps:
                        self.imports.append("libtorch_python.so" in maps.read())

        async def main():
            sys.meta_path.insert(0, Finder())
            engine = Engine(EngineConfig(threads=1, num_pages=64))
            await engine.start()
            print("loaded before:", sorted(set(Finder.imports)))
            print("on the loop:", Finder.watched)
            await engine.aclose()

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "loaded before: [True]",
        "on the loop: []",
    ]


@rest(PROGRAM)
def test_no_compiled_module_is_loaded_beside_torchs_libraries() -> None:
    """It would wait for them with the interpreter's lock, and everything else for it."""
    code = """if True:
        import sys, threading
        from aioinfer.checkpoint import libraries

        begun, reached, found, preload = [], threading.Event(), [], libraries.preload_torch

        def slow():
            # They are loading until the tokenizer's thread needs them, too.
            begun.append(threading.current_thread().name)
            if begun[-1] == "aioinfer-text":
                reached.set()
            assert reached.wait(200)
            return preload()

        def hook(event, arguments):
            # Which modules of Python's own are compiled differs.
            path = str(arguments[1]) if event == "import" and begun and not reached.is_set() else ""
            if path.endswith(".so") and "lib-dynload" not in path:
                found.append(arguments[0])

        libraries.preload_torch = slow
        sys.addaudithook(hook)
        from aioinfer.cli.main import main
        main(["generate", "Hello", "--max-tokens", "1", "--threads", "1"])
        print("loaded beside them:", found)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded beside them: []"
