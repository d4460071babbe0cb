"""An engine on an event loop and a thread of its own, for programs that have no loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from aioinfer.client.engine_like import EngineLike
from aioinfer.client.threadsafe import ThreadsafeEngine
from aioinfer.errors import EngineClosed, WrongLoop
from aioinfer.forks import this_process
from aioinfer.loop.belonging import require_process, running_loop
from aioinfer.loop.service import EngineState

__all__ = ["EngineInThread", "LoopThread"]

_T = TypeVar("_T")
_log = logging.getLogger("aioinfer")


class LoopThread:
    """Starts an engine on a loop of its own, and closes it when this is closed or dropped, or when the
    interpreter exits."""

    def __init__(self, engine: EngineLike, kind: str) -> None:
        """``kind``: in messages. Raises what the start raises."""
        self.kind = kind
        self.loop = asyncio.new_event_loop()
        self._process = this_process()
        #: Held while a call is handed over: before the end or not at all. Reentrant for signal handlers.
        self._lock = threading.RLock()
        # Neither the thread nor the finalizer refers to this object.
        self.thread = threading.Thread(target=_run_loop, args=(self.loop,), name="aioinfer-loop", daemon=True)
        self.thread.start()
        self._end = weakref.finalize(
            self, _end, engine, self.loop, self.thread, self._lock, self._process, kind
        )
        try:
            self.run(engine.start())
        except BaseException:
            self._end()
            raise

    @property
    def open(self) -> bool:
        """Calls are accepted."""
        return self._end.alive

    def check_open(self) -> None:
        """Raise EngineClosed when it is closed, and in a child of a fork; WrongLoop on its own
        thread."""
        require_process(self._process, self.kind)
        if not self._end.alive:
            raise EngineClosed(f"the {self.kind} is closed")
        if threading.current_thread() is self.thread:
            raise WrongLoop(f"a callback of the {self.kind} cannot call it: both would wait for each other")

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and wait for its result, on any other thread. What interrupts the wait
        cancels it. Raises EngineClosed."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[_T]] = []

        def begin() -> None:
            tasks.append(self.loop.create_task(work))
            tasks[0].add_done_callback(partial(self._tell, done))

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before that
                work.close()
                done.set_exception(asyncio.CancelledError())

        try:
            self.check_open()
            with self._lock:  # which a child of a fork must not wait for
                self.check_open()
                self.loop.call_soon_threadsafe(begin)
        except (EngineClosed, WrongLoop):
            work.close()
            raise
        except BaseException:
            self.loop.call_soon_threadsafe(stop)
            concurrent.futures.wait([done])
            raise
        try:
            return done.result()
        except BaseException:
            if not done.done():
                self.loop.call_soon_threadsafe(stop)
                concurrent.futures.wait([done])
            raise

    def _tell(self, done: concurrent.futures.Future[_T], task: asyncio.Task[_T]) -> None:
        """Tell a waiting thread what has become of a task."""
        if task.cancelled():
            done.set_exception(EngineClosed(f"the {self.kind} was closed"))
        elif (error := task.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def close(self) -> None:
        """Close the engine, the loop and the thread. Idempotent; does nothing in a child of a fork."""
        self._end()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped. What a callback raises that stops it, such as SystemExit, has ended the
    engine by then, and must not leave callers waiting."""
    for call in (loop.run_forever, lambda: loop.run_until_complete(_leave_nothing())):
        ended = False
        while not ended:
            try:
                call()
                ended = True
            except BaseException:
                _log.exception("a callback of the engine's loop has stopped it")
    loop.close()


async def _leave_nothing() -> None:
    """Cancel what still runs when the engine is closed, and what was handed over meanwhile."""
    await asyncio.sleep(0)
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)


def _end(
    engine: EngineLike,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    lock: AbstractContextManager[Any],
    process: object,
    kind: str,
) -> None:
    """Close an engine, its loop and the thread of that. On any thread."""

    async def end() -> None:
        try:
            if engine.state is not EngineState.STARTING:  # else its start is cancelled, with what is left
                await engine.aclose()
        finally:
            loop.stop()

    def begin() -> None:
        tasks.append(loop.create_task(end()))

    tasks: list[asyncio.Task[None]] = []
    if process is not this_process():
        return
    with lock:
        loop.call_soon_threadsafe(begin)
    if threading.current_thread() is not thread:  # else it is dropped by its own thread
        thread.join()


class EngineInThread(ThreadsafeEngine):
    """A started engine for programs without an event loop: WSGI applications, task queues, scripts, and trio.

    ::

        engine = Engine.in_thread(EngineConfig(model="/models/Qwen3-0.6B"))
        print(engine.generate("Once upon a time").result().text)

    All that a :class:`~aioinfer.client.threadsafe.ThreadsafeEngine` has can be called from any thread and any
    loop. It ends with :meth:`close` or its ``with`` block, when it is dropped, or when the interpreter exits.
    """

    def __init__(self, engine: EngineLike) -> None:
        """Raises as :meth:`aioinfer.Engine.start`."""
        self._home = LoopThread(engine, "engine")
        #: the engine itself, for what may be called on any thread: ``info``, ``stats``, ``register``
        self.engine = engine
        super().__init__(engine, engine.threadsafe().serving)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Close the engine, its loop and its thread; ``drain`` and ``timeout`` as of
        :meth:`aioinfer.Engine.aclose`. Idempotent."""
        if drain and self._home.open and running_loop() is not self._loop:
            try:
                self._home.run(self.engine.aclose(drain=True, timeout=timeout))
            except EngineClosed:
                pass  # another thread was faster, or this is a child of a fork
        self._home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain for up to ``config.drain_timeout`` seconds, and close; after an exception, close at once."""
        self.close(drain=kind is None)
