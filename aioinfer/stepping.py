"""SteppedEngine: an engine on a thread of its own, and its loop in its parts.

It computes while a call waits for it, and rests between calls.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar, Unpack

from aioinfer.checkpoint.sentences import Sentences
from aioinfer.client.in_thread import LoopThread
from aioinfer.client.requests import refuse_names
from aioinfer.config import EngineConfig, given
from aioinfer.engine import Engine
from aioinfer.execution.device import Device
from aioinfer.loop import factory
from aioinfer.loop.options import Prompt
from aioinfer.observe.stats import EngineStats
from aioinfer.outputs import Chunk, Result
from aioinfer.params import SamplingParams
from aioinfer.request import RequestOptions
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.core import Core
    from aioinfer.speculation.drafter import Drafter
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["SteppedEngine"]

_T = TypeVar("_T")


class SteppedEngine:
    """An engine on an event loop and a thread of its own, whose steps the caller takes. The base of
    :class:`~aioinfer.LLM`, which says more."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        device: Callable[[EngineConfig], Device] | None = None,
        tokenizer: Callable[[EngineConfig], Tokenizer | None] = factory.load_tokenizer,
        drafter: Drafter | None = None,
        **unknown: Never,
    ) -> None:
        """Load the model. Raises ConfigError, OutOfMemory. ``device`` and ``tokenizer`` replace the real
        ones in tests; ``drafter`` proposes tokens in place of ``config.speculation``."""
        refuse_names(type(self).__name__, unknown)
        self.config = given(config)
        launcher = factory.make_launcher if device is None else _inline(device)
        # The loop has nothing else to do: steps are launched on its thread.
        inline = dataclasses.replace(self.config, launch_mode="inline")
        self._engine = Engine(inline, launcher=launcher, tokenizer=tokenizer, drafter=drafter)
        self._home = LoopThread(self._engine, "LLM")
        self._keys = itertools.count(1)
        #: requests of :meth:`add_request` that were not returned, by key, and those that have ended
        self._open: dict[int, Stream] = {}
        #: of these, those whose chunks have not all been taken
        self._unread: dict[int, Stream] = {}
        #: calls for which the engine runs
        self._calls = 0
        self._run(self._engine.pause())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the engine's loop, which alone changes what this object has. What interrupts the
        wait cancels it. Raises EngineClosed, WrongLoop."""
        return self._home.run(work)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Have the engine compute, with all that it has."""
        self._calls += 1
        self._engine.resume()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls and not self._engine.closed:
                await self._engine.pause()

    async def _computed(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of a call while the engine computes."""
        async with self._running():
            return await call()

    # -- the loop in its parts ------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> int:
        """Queue a prompt; returns the key of its result in :meth:`step`. Raises InvalidRequest, Rejected.

        The options are those of :meth:`aioinfer.Engine.generate`. All arguments are copied.
        """
        return self._run(self._add(prompt, params, chat_template_kwargs, options))

    async def _add(self, *asked: Any) -> int:
        stream = await self._queued(*asked)
        key = next(self._keys)
        self._open[key] = self._unread[key] = stream
        return key

    async def _queued(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        template_kwargs: Mapping[str, Any] | None,
        options: RequestOptions,
    ) -> Stream:
        stream = self._engine.generate(prompt, params, chat_template_kwargs=template_kwargs, **options)
        await stream.accepted()
        return stream

    def has_unfinished(self) -> bool:
        """A request has not been returned by :meth:`step` yet, or a step is in flight."""
        return self._home.open and bool(self._open or self._engine._started().driver.steps_in_flight)

    def step(self) -> dict[int, Result]:
        """Compute one step and return the requests that finished with it, by key.

        As in the engine, ``overlap_steps`` steps are launched ahead of the one whose result is read. Raises
        the error of a request that failed; other requests that finished are returned by the next call.
        """
        return self._run(self._step())

    async def _step(self) -> dict[int, Result]:
        await self._engine._serving().driver.step()
        ended = {key: stream for key, stream in self._open.items() if stream.done}
        for key, stream in ended.items():
            error = stream.cell.output.error
            if error is not None:
                del self._open[key]
                raise error
        for key in ended:
            del self._open[key]
        return {key: stream.result() for key, stream in ended.items()}

    def take_chunks(self) -> dict[int, Chunk]:
        """New output of the requests since the previous call, by key; also of those that finished in the
        latest :meth:`step`. The chunks of one request are like those of a :class:`~aioinfer.Stream`: after
        an update of the weights its last ones can take further calls, until one has ``finish_reason``."""
        return self._run(self._take())

    async def _take(self) -> dict[int, Chunk]:
        chunks: dict[int, Chunk] = {}
        for key, stream in list(self._unread.items()):
            chunk = stream.cell.take()
            if chunk is not None:
                chunks[key] = chunk
            if stream.done and (chunk is None or chunk.finish_reason is not None):
                del self._unread[key]
        return chunks

    def abort(self, key: int) -> bool:
        """End a request; :meth:`step` does not return it. False if it is not there or has ended."""
        return self._home.open and self._run(self._abort(key))

    async def _abort(self, key: int) -> bool:
        stream = self._open.get(key)
        if stream is None or stream.done:
            return False
        del self._open[key], self._unread[key]
        stream.close()
        return True

    # -- observing ------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """Recommendations of the model for outputs."""
        return self._engine.default_params

    @property
    def sentences(self) -> Sentences:
        """Recommendations of the model for embeddings."""
        return self._engine.sentences

    @property
    def weight_version(self) -> int:
        """Version of the weights that compute the next step."""
        return self._engine.weight_version

    def stats(self) -> EngineStats:
        """A snapshot; O(1)."""
        return self._engine.stats()

    @property
    def _core(self) -> Core:
        return self._engine._core

    # -- its end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self._home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _inline(device: Callable[[EngineConfig], Device]) -> Callable[[EngineConfig], Launcher]:
    def launcher(config: EngineConfig) -> Launcher:
        from aioinfer.execution.launcher import InlineLauncher

        return InlineLauncher(device(config))

    return launcher
