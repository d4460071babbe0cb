"""Threads that cannot be started, and steps of closing that raise: what was begun is closed all the same."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import EngineClosed, EngineError
from aioinfer.execution import launcher as launching
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.loop.intake import Intake
from aioinfer.loop.runtime import Runtime
from aioinfer.loop.tuning import Tuning
from aioinfer.params import SamplingParams
from tests.engine.conftest import MakeEngine, OwnThreads
from tests.engine.test_launchers import AsynchronousToy
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
#: seconds, which only end a test that hangs
AT_ONCE = 60

Forbid = Callable[[str], None]


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Forbid:
    """Threads of these names cannot be started, until it is called with another one. Who waits for a thread
    waits for an hour."""
    start, refused, in_time = threading.Thread.start, "", launching._in_time

    def refuse(thread: threading.Thread) -> None:
        if refused and thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    def forbid(names: str) -> None:
        nonlocal refused
        refused = names

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(launching, "_in_time", lambda rested, _: in_time(rested, 3600.0))
    return forbid


def engine_on(launcher: Any, device: Any) -> Engine:
    config = EngineConfig(model="toy", page_size=4, num_pages=64)
    return Engine(config, launcher=lambda _: launcher(device), tokenizer=lambda _: ToyTokenizer())


async def works(engine: Engine) -> None:
    async with engine:
        assert (await engine.generate("text", SHORT)).finish_reason == "length"


@pytest.mark.parametrize("name", ["aioinfer-launch", "aioinfer-text"])
async def test_a_start_without_its_thread_fails_at_once(
    make_engine: MakeEngine, forbid: Forbid, name: str, own_threads: OwnThreads
) -> None:
    engine = make_engine()
    forbid(name)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await engine.start()
    assert engine.state is EngineState.CLOSED
    assert own_threads() == []
    forbid("")
    await works(engine)


@pytest.mark.parametrize("launcher", [ThreadLauncher, InlineLauncher])
async def test_a_start_without_a_completion_thread_fails_and_closes_the_device(
    forbid: Forbid, launcher: Any, own_threads: OwnThreads
) -> None:
    device = AsynchronousToy(num_slots=EngineConfig(model="toy").num_slots)
    engine = engine_on(launcher, device)
    forbid("aioinfer-completion")
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await engine.start()
    assert engine.state is EngineState.CLOSED
    assert device.closed
    assert own_threads() == []


async def test_a_prompt_without_a_thread_fails_alone(make_engine: MakeEngine, forbid: Forbid) -> None:
    async with make_engine() as engine:
        forbid("aioinfer-text-grammar")
        constrained = SamplingParams(max_tokens=5, bad_words=["a"])
        with pytest.raises(EngineError, match="can't start new thread"):
            await engine.generate("text", constrained)
        assert (await engine.generate([1], SHORT)).token_ids == toy_generate([1], SHORT)
        forbid("")
        await engine.generate("text", constrained)


async def test_what_one_part_raises_when_a_start_is_undone_does_not_keep_the_others_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own_threads: OwnThreads
) -> None:
    """And the start raises what it failed with."""

    class Broken(ThreadLauncher):
        async def aclose(self, timeout: float = 10.0) -> bool:
            await super().aclose(timeout)
            raise OSError("the launcher does not close")

    class Unreadable(ToyDevice):
        def open(self, progress: Any = None) -> Any:
            raise ValueError("the model is not readable")

    engine = engine_on(Broken, Unreadable())
    with caplog.at_level(logging.ERROR, "aioinfer"), pytest.raises(ValueError, match="not readable"):
        await engine.start()
    assert "could not be closed cleanly" in caplog.text
    assert "the launcher does not close" in caplog.text
    assert engine.state is EngineState.CLOSED
    assert own_threads() == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Runtime, "_end_all"), (Tuning, "undo"), (Intake, "close"), (ThreadLauncher, "aclose")],
)
async def test_what_one_step_of_closing_raises_does_not_skip_the_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, own_threads: OwnThreads
) -> None:
    real = getattr(owner, name)

    def raising(*given: Any) -> Any:
        real(*given)
        raise OSError(f"{name} raised")

    async def raising_later(*given: Any) -> Any:
        await real(*given)
        raise OSError(f"{name} raised")

    engine = make_engine()
    await engine.start()
    waiting = engine.generate("text", SamplingParams(max_tokens=50, ignore_eos=True))
    gc.disable()  # an engine of another test that goes meanwhile would raise in its finalizer
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising_later if name == "aclose" else raising)
            with pytest.raises(OSError, match=f"{name} raised"):
                await engine.aclose()
    finally:
        gc.enable()
    assert engine.state is EngineState.CLOSED
    assert [name for name in own_threads() if "text" not in name] == []  # those end by themselves
    with pytest.raises(EngineClosed):
        await waiting
    await works(engine)
