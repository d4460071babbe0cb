"""Worker threads that end unasked."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from aioinfer.errors import EngineError
from aioinfer.execution.workers import WorkerExecutor, Workers

LONG = 60.0


def names(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.parametrize("error", [SystemExit("no more"), ValueError("broken")])
def test_a_thread_that_dies_fails_what_it_had_at_hand_and_is_replaced(error: BaseException) -> None:
    done: list[int] = []
    failed: list[tuple[int, BaseException]] = []
    over, begun, go = threading.Event(), threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number == 1000:
            begun.set()
            go.wait(LONG)
            raise error
        done.append(number)
        if number == 1003:
            over.set()

    workers = Workers("test-dying", 1, work, lambda number, cause: failed.append((number, cause)))
    for number in range(1000, 1004):
        workers.put(number)
    assert begun.wait(LONG)
    (thread,) = names("test-dying")
    go.set()
    assert over.wait(LONG), "what was queued behind has no thread"
    thread.join(LONG)
    assert not thread.is_alive()
    assert failed == [(1000, error)]
    assert done == [1001, 1002, 1003]
    for thread in workers.close():
        thread.join(LONG)
    assert not names("test-dying")


def kill(workers: Workers[Any], thread: threading.Thread) -> None:
    """Raise SystemExit in a thread that waits for work, and have it notice."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    for _ in range(10_000):
        # Not known as work, so it is passed over; another thread may take it.
        workers._inbox.put(object())
        thread.join(0.01)
        if not thread.is_alive():
            break
    assert not thread.is_alive()


def test_an_idle_thread_that_dies_is_told_and_replaced_with_the_next_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = WorkerExecutor(2, "test-idle")
    assert executor.submit(int, "7").result(LONG) == 7
    (thread,) = names("test-idle")
    with caplog.at_level(logging.ERROR, "aioinfer"):
        kill(executor._workers, thread)
    assert "test-idle ended and is replaced" in caplog.text
    assert executor.submit(int, "8").result(LONG) == 8
    executor.shutdown()
    assert not names("test-idle")


def test_a_call_whose_thread_dies_has_an_error() -> None:
    executor = WorkerExecutor(1, "test-call")

    def die(call: Any) -> None:
        raise MemoryError

    executor._workers._work = die
    future: Future[int] = executor.submit(int, "7")
    with pytest.raises(EngineError, match="MemoryError"):
        future.result(LONG)
    executor.shutdown()


def test_an_executor_runs_cancels_and_refuses_as_a_thread_pool_does() -> None:
    executor = WorkerExecutor(1, "test-pool")
    entered, go = threading.Event(), threading.Event()
    first = executor.submit(lambda: (entered.set(), go.wait(LONG)) and 1)
    second = executor.submit(lambda: 2)
    assert entered.wait(LONG)
    executor.shutdown(wait=False, cancel_futures=True)
    executor.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    go.set()
    assert first.result(LONG) == 1
    with pytest.raises(RuntimeError):
        executor.submit(int)
    executor.shutdown()
    for thread in names("test-pool"):
        thread.join(LONG)
        assert not thread.is_alive()


def test_an_executor_that_is_dropped_leaves_no_thread() -> None:
    executor = WorkerExecutor(1, "test-drop")
    assert executor.submit(int).result(LONG) == 0
    (thread,) = names("test-drop")
    del executor
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_an_executor_that_is_collected_under_its_own_lock_does_not_wait_for_it() -> None:
    """A finalizer runs on any thread, between any two instructions."""
    executor = WorkerExecutor(1, "test-locked")
    assert executor.submit(int).result(LONG) == 0
    (thread,) = names("test-locked")
    workers = executor._workers

    def finalize() -> None:
        with workers._lock:
            executor.__del__()

    finalizer = threading.Thread(target=finalize, daemon=True)
    finalizer.start()
    finalizer.join(LONG)
    assert not finalizer.is_alive(), "the finalizer waits for the lock that its thread holds"
    thread.join(LONG)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(int)


def test_work_that_no_thread_will_do_fails_with_the_last_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread that died cannot be replaced, nothing waits for it."""
    failed: list[tuple[int, str]] = []
    begun, go = threading.Event(), threading.Event()

    def work(number: int) -> None:
        begun.set()
        go.wait(LONG)
        raise MemoryError(f"over {number}")

    workers = Workers("test-last", 1, work, lambda number, cause: failed.append((number, str(cause))))
    for number in range(2000, 2004):
        workers.put(number)
    assert begun.wait(LONG)
    (thread,) = names("test-last")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    go.set()
    thread.join(LONG)
    assert not thread.is_alive()
    assert sorted(failed) == [(number, "over 2000") for number in range(2000, 2004)]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        workers.put(2004)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert workers.close() == []
