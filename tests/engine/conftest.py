"""Engines on the toy device, on a real loop and a real launch thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.outputs import Result
from aioinfer.scheduling.step import Step
from tests.toys import ToyDevice, ToyTokenizer


class Gate:
    """Holds steps on the launch thread until the test lets them go, one by one or for good."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.open = False
        self.arrived = threading.Semaphore(0)

    def __call__(self, step: Step) -> None:
        self.arrived.release()
        if not self.open:
            self._permits.acquire()

    def step(self, count: int = 1) -> None:
        if count:
            self._permits.release(count)

    def release(self) -> None:
        self.open = True
        self._permits.release(1000)


class OwnThreads:
    """Threads of engines that were started since this was made: what another test has left behind may end at
    any time, or not at all. A call gives their names."""

    def __init__(self) -> None:
        self._before = {*threading.enumerate()}

    def __call__(self) -> list[str]:
        return [thread.name for thread in self.threads()]

    def threads(self) -> list[threading.Thread]:
        new = [thread for thread in threading.enumerate() if thread not in self._before]
        return [thread for thread in new if thread.name.startswith("aioinfer")]


@pytest.fixture
def own_threads() -> OwnThreads:
    return OwnThreads()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> MakeEngine:
    def make(
        *, fault: Any = None, tokenizer: Any = ToyTokenizer, device: Any = None, **settings: Any
    ) -> Engine:
        config = EngineConfig(
            **{"model": "toy", "page_size": 4, "num_pages": 64, "max_running_requests": 8, **settings}
        )
        toy = device or ToyDevice(
            num_pages=config.num_pages or 0,
            page_size=config.page_size,
            num_slots=config.num_slots,
            fault=fault,
        )
        launcher = ThreadLauncher if config.launch_mode == "thread" else InlineLauncher
        return Engine(config, launcher=lambda _: launcher(toy), tokenizer=lambda _: tokenizer and tokenizer())

    return make


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.release()


@pytest.fixture(scope="session")
def alone() -> list[Result]:
    """Answers of the bundled model in float32 to ``bundled_requests``, one at a time."""
    from aioinfer.llm import LLM
    from tests.engine.asking import bundled_requests

    config = EngineConfig(dtype="float32", overlap_steps=0, max_running_requests=1, threads=1)
    with LLM(config) as llm:
        return [llm.generate([prompt], params)[0] for prompt, params in bundled_requests()]
