"""The emulated runtime keeps order, time, memory and the rules of captures; without torch."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from collections.abc import Callable
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_emulation.__main__ import build_runtime
from tests.tiers import COMPILES, nightly

FULL, NOT_READY, IN_CAPTURE, INVALIDATED, IMPLICIT, ISOLATED = 2, 600, 900, 901, 906, 905
NON_BLOCKING, THREAD_LOCAL = 1, 1
_TYPES = {
    "cudaMalloc": [c_void_p, c_size_t],
    "cudaHostAlloc": [c_void_p, c_size_t, c_uint],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "emulated_work": [c_void_p, ctypes.c_long, c_char_p, c_int],
    "emulated_launch": [c_void_p, c_char_p, c_double],
}


class Runtime:
    """The library, loaded anew; work is Python's."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, types in _TYPES.items():
            getattr(self._library, name).argtypes = types
        self._calls: list[Callable[[], object]] = []
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_long)(lambda number: self._calls[number]())
        self._library.emulated_python(self._run)

    def error(self, name: str, *arguments: Any) -> int:
        code: int = getattr(self._library, name)(*arguments)
        return code

    def __call__(self, name: str, *arguments: Any) -> None:
        assert self.error(name, *arguments) == 0

    def made(self, name: str, *arguments: Any) -> c_void_p:
        handle = c_void_p()
        self(name, byref(handle), *arguments)
        return handle

    def stream(self) -> c_void_p:
        return self.made("cudaStreamCreateWithPriority", c_uint(NON_BLOCKING), 0)

    def work(self, stream: c_void_p | None, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self("emulated_work", stream, len(self._calls) - 1, b"work", 0)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_runtime(tmp_path_factory.mktemp("runtime"))


@pytest.fixture
def load(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    numbers = itertools.count()

    def load(**settings: float) -> Runtime:
        for name, value in settings.items():
            monkeypatch.setenv(f"EMULATED_{name.upper()}", str(value))
        # A copy is another library to the loader, with settings of its own.
        return Runtime(Path(shutil.copy(library, tmp_path / f"{next(numbers)}.so")))

    return load


def capture(runtime: Runtime, stream: c_void_p, call: Callable[[], object]) -> c_void_p:
    runtime("cudaStreamBeginCapture", stream, THREAD_LOCAL)
    call()
    graph = c_void_p()
    runtime("cudaStreamEndCapture", stream, byref(graph))
    return runtime.made("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))


@nightly(COMPILES)
def test_memory_is_counted_and_ends(load: Callable[..., Runtime]) -> None:
    runtime = load(gib=5)
    free, total = c_size_t(), c_size_t()
    runtime("cudaMemGetInfo", byref(free), byref(total))
    before = free.value
    held = runtime.made("cudaMalloc", 3 << 30)
    runtime("cudaMemGetInfo", byref(free), byref(total))
    assert (before - free.value, total.value) == (3 << 30, 5 << 30)
    assert runtime.error("cudaMalloc", byref(c_void_p()), 2 << 30) == FULL
    runtime("cudaFree", held)
    runtime("cudaFree", runtime.made("cudaMalloc", 4 << 30))


def test_late_work_is_done_for_waiters_only(load: Callable[..., Runtime]) -> None:
    runtime, done = load(late=1), []
    first, second, third = (runtime.stream() for _ in range(3))
    event = runtime.made("cudaEventCreate")
    runtime.work(first, lambda: done.append("first"))
    runtime("cudaEventRecord", event, first)
    runtime.work(first, lambda: done.append("behind the event"))
    runtime("cudaStreamWaitEvent", second, event, 0)
    runtime.work(second, lambda: done.append("second"))
    runtime.work(third, lambda: done.append("third"))
    runtime("cudaStreamSynchronize", third)
    assert done == ["third"]
    runtime("cudaStreamSynchronize", second)
    assert done == ["third", "first", "second"]
    runtime("cudaDeviceSynchronize")
    assert done == ["third", "first", "second", "behind the event"]


def test_a_graph_does_nothing_when_captured_and_all_of_it_when_replayed(load: Callable[..., Runtime]) -> None:
    runtime, done = load(), []
    stream = runtime.stream()

    def work() -> None:
        runtime.work(stream, lambda: done.append("a"))
        runtime.work(stream, lambda: done.append("b"))

    graph = capture(runtime, stream, work)
    assert done == []
    for _ in range(2):
        runtime("cudaGraphLaunch", graph, stream)
    assert done == ["a", "b"] * 2


@pytest.mark.parametrize(
    "call", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaFree", "cudaStreamQuery"]
)
def test_what_may_wait_is_refused_in_a_capture(
    load: Callable[..., Runtime], call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = load()
    stream, held = runtime.stream(), runtime.made("cudaMalloc", 4)
    arguments: dict[str, tuple[Any, ...]] = {
        "cudaDeviceSynchronize": (),
        "cudaMalloc": (byref(c_void_p()), 4),
        "cudaFree": (held,),
    }
    runtime("cudaStreamBeginCapture", stream, THREAD_LOCAL)
    assert runtime.error(call, *arguments.get(call, (stream,))) == IN_CAPTURE
    assert runtime.error("cudaStreamEndCapture", stream, byref(c_void_p())) == INVALIDATED
    assert "captur" in capfd.readouterr().err
