"""Workers: a thread pool that a call without end cannot keep from ending, nor the process."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["Workers"]

_T = TypeVar("_T")
#: seconds that an idle thread waits for work before it ends
_IDLE = 30.0
#: seconds that the exit of the process waits for calls: the interpreter must not end below native code
_EXIT = 2.0


class _Call:
    """A call, and the future of its result."""

    __slots__ = ("call", "future")

    def __init__(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.future = future
        self.call = call


class Workers(Executor):
    """An executor of up to ``count`` daemon threads, started on demand.

    Unlike those of ThreadPoolExecutor, its threads are not waited for when the process exits, except for two
    seconds: a chat template is a program, and may loop.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        #: threads that run a call
        self._busy: set[threading.Thread] = set()
        #: calls that no thread has taken
        self._waiting = 0
        self._started = 0
        self._closed = False
        _open.add(self)

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Run a call on a thread. Raises RuntimeError after :meth:`shutdown`."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers are closed")
            self._waiting += 1
            self._calls.put(_Call(future, lambda: fn(*args, **kwargs)))
            idle = len(self._threads) - len(self._busy)
            if self._waiting > idle and len(self._threads) < self._count:
                self._start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end. Idle ones have ended on return; with ``wait``, the others, too."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_waiting()
            # A call that waits still was taken by one of the idle threads just now.
            idle = set() if self._waiting else self._threads - self._busy
            threads = set(self._threads) if wait else idle
            for _ in self._threads:
                self._calls.put(None)
        for thread in threads:
            thread.join()

    def _cancel_waiting(self) -> None:
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                self._waiting -= 1
                call.future.cancel()

    def _start(self) -> None:
        self._started += 1
        name = f"{self._name}_{self._started - 1}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        own = threading.current_thread()
        while (call := self._next(own)) is not None:
            future = call.future
            result, error = None, None
            if future.set_running_or_notify_cancel():
                try:
                    result = call.call()
                except BaseException as raised:
                    error = raised
            # Idle before its caller goes on, which may close the pool and count its threads.
            with self._lock:
                self._busy.discard(own)
            if future.cancelled():
                pass
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, result, error  # nothing is kept while the thread is idle

    def _next(self, own: threading.Thread) -> _Call | None:
        """The next call, or None to end."""
        while True:
            try:
                call = self._calls.get(timeout=_IDLE)
            except queue.Empty:
                call = None
            with self._lock:
                if call is not None:
                    self._waiting -= 1
                    self._busy.add(own)
                    return call
                if self._closed or not self._waiting:
                    self._threads.discard(own)
                    return None

    def join_calls(self, until: float) -> None:
        """Wait for the running calls, up to a time of time.monotonic()."""
        for thread in list(self._busy):
            thread.join(max(0.0, until - time.monotonic()))


_open: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    until = time.monotonic() + _EXIT
    for workers in list(_open):
        workers.shutdown(wait=False, cancel_futures=True)
    for workers in list(_open):
        workers.join_calls(until)
