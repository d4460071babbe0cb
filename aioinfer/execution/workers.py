"""Workers: daemon threads that are replaced when one ends unasked, and an executor of such threads.

A thread cannot be trusted to live: ``MemoryError`` and exceptions that other code sends to threads strike
between two calls, too. The work of a dead thread fails at once, and the rest goes on in another thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from aioinfer.errors import EngineError
from aioinfer.forks import in_children

__all__ = ["WorkerExecutor", "Workers"]

_log = logging.getLogger("aioinfer")
#: seconds that the exit of the process waits for calls
_EXIT = 2.0
#: Bytes of a thread's stack; only what is used takes memory. Systems give threads 128 KiB to 8 MiB. Grammars
#: are compiled by recursion, and the bound of its depth (aioinfer.text.grammar_bounds) goes with this.
_STACK = 16 << 20
#: while ``threading.stack_size``, which holds for every thread that starts, is changed
_starting = threading.Lock()


@in_children
def _forked() -> None:
    global _starting
    _starting = threading.Lock()
    _executors.clear()


_Work = TypeVar("_Work")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class Workers(Generic[_Work]):
    """Threads over one queue: one, and more while work is open, up to ``most``.

    ``work`` is called with each piece of work; ``fail`` with one that ``work`` did not finish because its
    thread ends with an error, on that thread.
    """

    def __init__(
        self,
        name: str,
        most: int,
        work: Callable[[_Work], None],
        fail: Callable[[_Work, BaseException], None],
    ) -> None:
        self._name = name
        self._most = most
        self._work = work
        self._fail = fail
        self._inbox: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        #: told to end
        self._closing: list[threading.Thread] = []
        self._lock = threading.Lock()
        #: pieces of work that are not finished, by id; and of these the ones at hand, by thread
        self._open: dict[int, _Work] = {}
        self._at_hand: dict[int, _Work] = {}

    def put(self, work: _Work) -> None:
        with self._lock:
            self._open[id(work)] = work
            try:
                self._start()
            except RuntimeError:  # no thread can be started
                if not self._threads:
                    del self._open[id(work)]
                    raise
        self._inbox.put(work)

    def take_waiting(self) -> list[_Work]:
        """Take back the work that no thread has begun."""
        taken: list[_Work] = []
        try:
            while (work := self._inbox.get_nowait()) is not None:
                taken.append(work)
        except Empty:
            pass
        with self._lock:
            for work in taken:
                self._open.pop(id(work), None)
        return taken

    def close(self) -> list[threading.Thread]:
        """Have the threads end after the work that was put; returns them. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, []
            self._closing += threads
        for _ in threads:
            self._inbox.put(None)
        return [thread for thread in self._closing if thread.is_alive()]

    def abandon(self) -> None:
        """Close without the lock, for a finalizer."""
        for _ in self._threads:
            self._inbox.put(None)

    def idle(self, done: Callable[[_Work], bool]) -> list[threading.Thread]:
        """The threads that :meth:`close` has told to end and that end at once: they have no work, or are
        ``done`` with it."""
        with self._lock:
            if len(self._open) > len(self._at_hand):
                return []  # one of them has taken work just now
            busy = {thread for thread, work in self._at_hand.items() if not done(work)}
            busy.add(threading.get_ident())
            return [each for each in self._closing if each.ident not in busy]

    def _start(self) -> None:
        """One more thread, if there is work for it. Under the lock."""
        if len(self._threads) < min(len(self._open), self._most):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with _starting:
                before = threading.stack_size(_STACK)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
            self._threads.append(thread)

    def _run(self) -> None:
        try:
            while (work := self._inbox.get()) is not None:
                if id(work) not in self._open:
                    continue  # it failed with a thread that died
                self._at_hand[threading.get_ident()] = work
                self._work(work)
                del work
                self._finished()
        except BaseException as error:
            self._ended(error)

    def _finished(self) -> list[_Work]:
        """This thread is done with its work; returns it."""
        with self._lock:
            work = self._at_hand.pop(threading.get_ident(), None)
            return [] if work is None or self._open.pop(id(work), None) is None else [work]

    def _ended(self, error: BaseException) -> None:
        """This thread ends with an error: nothing may wait for it."""
        _log.error("a thread %s ended and is replaced", self._name, exc_info=error)
        failed = self._finished()
        with self._lock:
            if not failed:
                # It may have been taken from the queue and not be at hand yet: then it is any of the others.
                at_hand = {id(work) for work in self._at_hand.values()}
                failed = [self._open.pop(key) for key in list(self._open) if key not in at_hand]
            if threading.current_thread() in self._threads:
                self._threads.remove(threading.current_thread())
                try:
                    self._start()
                except RuntimeError:  # no thread can be started
                    if not self._threads:
                        failed += self._open.values()
                        self._open.clear()
        for work in failed:
            self._fail(work, error)


#: a future and what it is the result of
_Call = tuple["Future[Any]", Callable[[], Any]]


class WorkerExecutor(Executor):
    """A ``ThreadPoolExecutor`` with two differences: a thread that dies fails its own call and is replaced,
    and a call that never returns (a chat template is a program, and may loop) keeps the process from exiting
    for two seconds only."""

    def __init__(self, most: int, name: str) -> None:
        self._workers: Workers[_Call] = Workers(name, most, _call, _fail)
        self._closed = False
        _executors.add(self)

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Raises RuntimeError after :meth:`shutdown`, and where no thread can be started."""
        if self._closed:
            raise RuntimeError("the executor was shut down")
        future: Future[_Result] = Future()
        self._workers.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end. Idle ones have ended on return; with ``wait``, the others, too."""
        if cancel_futures and not self._closed:
            for future, _ in self._workers.take_waiting():
                future.cancel()
                future.set_running_or_notify_cancel()
        self._closed = True
        threads = self._workers.close()
        for thread in threads if wait else self._workers.idle(_done):
            thread.join()

    def join_calls(self, until: float) -> None:
        """Wait after :meth:`shutdown` for the running calls, up to a time of time.monotonic()."""
        for thread in self._workers.close():
            thread.join(max(0.0, until - time.monotonic()))

    def __del__(self) -> None:
        # On any thread, at any point: nothing here waits for a lock or a thread.
        self._closed = True
        self._workers.abandon()


def _call(call: _Call) -> None:
    future, function = call
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _done(call: _Call) -> bool:
    future, _ = call
    return future.done()


def _fail(call: _Call, error: BaseException) -> None:
    future, _ = call
    if not future.done():
        lost = EngineError(f"the thread that had this call ended: {error!r}")
        lost.__cause__ = error
        future.set_exception(lost)


_executors: weakref.WeakSet[WorkerExecutor] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    # The interpreter must not end below native code.
    until = time.monotonic() + _EXIT
    for executor in list(_executors):
        executor.shutdown(wait=False, cancel_futures=True)
    for executor in list(_executors):
        executor.join_calls(until)
