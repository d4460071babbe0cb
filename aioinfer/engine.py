"""Engine: what an application holds. It starts and closes a runtime and passes requests to it.

:mod:`aioinfer.loop.runtime` keeps the open requests, :mod:`aioinfer.loop.driver` computes them.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Never, ParamSpec

from aioinfer.cache.namespace import Namespace
from aioinfer.cache.radix import token_key
from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.asking import import_chats
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.client.engine_like import EngineLike
from aioinfer.client.in_thread import EngineInThread
from aioinfer.client.requests import refuse_names
from aioinfer.config import EngineConfig, given
from aioinfer.embeddings.embedding import honest
from aioinfer.errors import EngineError
from aioinfer.execution.device import DeviceInfo, Progress
from aioinfer.execution.opening import Opening
from aioinfer.forks import this_process
from aioinfer.loop import factory, observing
from aioinfer.loop.adapters import AdapterLoads
from aioinfer.loop.belonging import asyncio_loop, require_loop, require_process
from aioinfer.loop.clock import clock_of
from aioinfer.loop.intake import Intake
from aioinfer.loop.options import Prompt
from aioinfer.loop.runtime import Runtime
from aioinfer.loop.service import EngineState, not_started
from aioinfer.loop.updating import UpdateMode, WeightSource
from aioinfer.observe.observers import Observer
from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Timeline
from aioinfer.observe.tracing import require_api
from aioinfer.outputs import AdapterInfo
from aioinfer.params import SamplingParams
from aioinfer.request import check_timeout

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.core import Core
    from aioinfer.observe.metrics.measuring import Measuring
    from aioinfer.scheduling.costs import Costs
    from aioinfer.speculation.drafter import Drafter
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Engine", "EngineState", "Prompt"]

_log = logging.getLogger("aioinfer")
#: numbers of the engines of this process, in the order of their starts
_started = itertools.count(1)
_Arguments = ParamSpec("_Arguments")


class Engine(EngineLike):
    """A language model inside this event loop.

    ::

        async with Engine(EngineConfig(model="/models/Qwen3-0.6B")) as engine:
            async for chunk in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(chunk.text, end="")

    It belongs to the loop that started it. It starts no task; it starts one thread for the device (two on
    CUDA) if ``launch_mode`` is "thread", and when these are needed up to four for tokenizing and grammars,
    three that carry pages, and one that reads files. It touches no signal, no loop policy, no logging root
    and no environment variable; :mod:`aioinfer.loop.tuning` says what it changes in the process, on CUDA
    only, and how to prevent that. A closed engine can be started again, also under a new loop.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        launcher: Callable[[EngineConfig], Launcher] = factory.make_launcher,
        tokenizer: Callable[[EngineConfig], Tokenizer | None] = factory.load_tokenizer,
        drafter: Drafter | None = None,
        **unknown: Never,
    ) -> None:
        """``launcher`` and ``tokenizer`` replace the real ones in tests and simulations; ``tokenizer``
        is called on a worker thread. ``drafter`` proposes tokens in place of ``config.speculation``."""
        refuse_names(type(self).__name__, unknown)
        self.config = given(config)
        self.default_params = SamplingParams()
        self.sentences = Sentences()
        self._chat_format = ChatFormat()
        self._make_launcher = launcher
        self._load_tokenizer = tokenizer
        self._drafter = drafter
        #: the loop that start() is running on
        self._starting: asyncio.AbstractEventLoop | None = None
        #: the process that it was made or started in
        self._process = this_process()
        #: from the end of start() on, also when closed
        self._runtime: Runtime | None = None
        #: the state while there is no runtime
        self._idle = EngineState.NEW
        #: closes what a start that failed or was cancelled has left
        self._leaving: asyncio.Task[None] | None = None
        #: the metrics, once someone wants them
        self._measuring: Measuring | None = None

    # -- life -----------------------------------------------------------------------------------

    async def start(self, progress: Progress | None = None) -> None:
        """Load the model and begin to serve on the running loop. Raises ConfigError, OutOfMemory, and
        WrongLoop where asyncio does not run, under trio for example.

        When cancelled, it ends the compilers, threads and files of the start before it raises; when cancelled
        again meanwhile, that goes on in the background. Then the engine is closed and can be started again.

        ``progress(stage, done, total)`` is called from other threads while the model is downloaded
        ("download", bytes, all bytes) and loads, with the context variables of the caller.
        """
        loop = asyncio_loop()
        self._forget_dead_loop()
        if self.state not in (EngineState.NEW, EngineState.CLOSED):
            raise EngineError(f"the engine cannot be started: it is {self.state.value}")
        self._reset(EngineState.STARTING)
        self._starting, self._process = loop, this_process()
        try:
            # An earlier start may hold memory still, which this one would find missing.
            if self._leaving is not None and self._leaving.get_loop() is loop:
                await asyncio.wait([self._leaving])
            self._runtime = await self._begin(loop, None if progress is None else _in_context(progress))
        except BaseException:
            self._reset(EngineState.CLOSED)
            raise
        self._starting = None

    async def _begin(self, loop: asyncio.AbstractEventLoop, progress: Progress | None) -> Runtime:
        """Open everything. If that fails or is cancelled, close what has been begun."""
        if self.config.tracing:
            require_api()
        intake = Intake(loop)
        launcher: Launcher | None = None
        try:
            await intake.run(factory.import_parts, self.config.policy)
            config = await self._located(intake, progress)
            launcher = self._make_launcher(config)
            return await self._open(config, launcher, intake, progress)
        except BaseException:
            # In a task: another cancellation ends the waiting and not the closing.
            self._leaving = loop.create_task(_leave(launcher, intake), name="aioinfer-closing")
            await asyncio.wait([self._leaving])
            raise

    async def _located(self, intake: Intake, progress: Progress | None) -> EngineConfig:
        """The config with its model's place on this machine. Cancelling it ends a download."""
        if self._make_launcher is not factory.make_launcher:
            return self.config  # with a device that has a model of its own
        opening = Opening(progress)
        try:
            return await intake.run(factory.located, self.config, opening)
        except asyncio.CancelledError:
            opening.cancel()
            raise

    async def _open(
        self, config: EngineConfig, launcher: Launcher, intake: Intake, progress: Progress | None
    ) -> Runtime:
        from aioinfer.loop.core import Core  # imported by now, see import_parts

        # Beside the device, which loads libraries and weights without the interpreter's lock.
        loading = intake.begin(self._load_texts, config)
        info = await launcher.start(progress)
        tokenizer = await loading
        fingerprint = await intake.run(factory.fingerprint, config)
        defaults = await intake.run(factory.default_params, config, info)
        sentences = await intake.run(factory.sentences, config)
        config = factory.decide(
            config,
            info.block_size,
            asynchronous=launcher.asynchronous,
            info=info,
        )
        info = factory.completed(info, tokenizer, config, fingerprint)
        costs = await intake.run(self._step_costs, config)
        core = Core(config, info, tokenizer, clock_of(intake.loop), self._drafter, costs)
        await intake.run(core.preparing.warm_up)
        adapters = AdapterLoads(core.adapters, launcher, intake, config.model_name)
        await adapters.load_all(config.adapter_paths)
        found = await intake.run(ChatFormat.of, tokenizer, config.tool_call_parser, config.reasoning_parser)
        self.default_params, self.sentences, self._chat_format = defaults, sentences, found
        store = await intake.run(factory.page_store, config, info)
        runtime = Runtime(config, core, launcher, intake, adapters)
        if store is not None:
            runtime.transfers.attach(store, behind=True, owned=True)
        if self._measuring is not None:
            runtime.measure(self._measuring)
        observing.observe(runtime, self.config, runtime.stats)
        _log.info("engine %d, %s, started: %s", next(_started), config.model_name, info.decisions)
        return runtime

    def _step_costs(self, config: EngineConfig) -> Costs | None:
        return factory.step_costs(config)

    def _load_texts(self, config: EngineConfig) -> Tokenizer | None:
        """The tokenizer, and what chats import. Blocks. Raises ConfigError."""
        import_chats()
        return self._load_tokenizer(config)

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop serving. Idempotent; when cancelled, closing goes on in the background.

        With ``drain``, open requests may finish first, for at most ``timeout`` seconds (default
        ``config.drain_timeout``, 30); leaving an ``async with`` block without an exception does the same.
        Those left then end with :class:`~aioinfer.EngineClosed`. A second call without ``drain`` cuts the
        waiting short.

        Raises:
            InvalidRequest: ``timeout`` is not a number of seconds.
            EngineError: the engine is still starting.
        """
        self._forget_dead_loop()
        if self._loop is None:
            if self._measuring is not None:
                self._measuring.closed()
            self._reset(EngineState.CLOSED)
            return
        require_loop(self._loop)
        if self._runtime is None:
            raise EngineError("the engine is still starting")
        if timeout != 0:
            check_timeout("timeout", timeout)
        seconds = self.config.drain_timeout if timeout is None else timeout
        await self._runtime.aclose(seconds if drain else None)

    def _reset(self, state: EngineState) -> None:
        self._idle = state
        self._starting = self._runtime = None
        self.default_params, self.sentences, self._chat_format = SamplingParams(), Sentences(), ChatFormat()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the engine belongs to, from start() until it is closed."""
        if self._runtime is None:
            return self._starting
        return None if self._runtime.state is EngineState.CLOSED else self._runtime.loop

    def _forget_dead_loop(self) -> None:
        """An engine that outlived its loop, or is a copy amid its start in a child of a fork, is closed."""
        if self._starting is not None and self._process is not this_process():
            self._reset(EngineState.CLOSED)
        if self._loop is not None and self._loop.is_closed():
            if self._runtime is not None:
                self._runtime.outlive_loop()
            self._reset(EngineState.CLOSED)

    @classmethod
    def in_thread(
        cls: Callable[_Arguments, Engine], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> EngineInThread:
        """Start an engine on a loop and a thread of its own, for programs without a loop; the arguments are
        those of the class. It is closed by its ``close()`` or ``with``, and when the interpreter exits. Waits
        for the start, and raises as :meth:`start`."""
        return EngineInThread(cls(*args, **kwargs))

    # -- pausing --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Launch no more steps; returns when those in flight have resolved.

        Requests are still accepted and wait; running ones keep their pages, and deadlines run on.
        Raises EngineClosed, EngineFailed, WrongLoop.
        """
        runtime = self._serving()
        await runtime.driver.pause()
        runtime.check_serving()

    def resume(self) -> None:
        """Go on after :meth:`pause`. Idempotent."""
        if self._loop is not None:
            require_loop(self._loop)
        if self._runtime is not None:
            self._runtime.driver.resume()

    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns how many pages that freed at once.

        Pages that running requests read are freed when those end, and no new request finds them.
        Raises EngineClosed, EngineFailed, WrongLoop.
        """
        runtime = self._serving()
        freed = runtime.core.scheduler.memory.flush()
        runtime.driver.wake()
        return freed

    def cached_tokens(
        self, token_ids: Sequence[int], *, cache_salt: str = "", adapter: str | None = None
    ) -> int:
        """The number of these tokens, from the first on, that are in the prefix cache at this moment.

        Raises InvalidRequest, EngineClosed, EngineFailed, WrongLoop.
        """
        caches = self._serving().core.scheduler.memory.tree is not None
        return self._cached_tokens(token_key(token_ids) if caches else b"", cache_salt, adapter)

    def _cached_tokens(self, key: bytes, cache_salt: str, adapter: str | None) -> int:
        core = self._serving().core
        uid = 0 if adapter is None else core.adapters.find(adapter).uid
        namespace = Namespace(cache_salt, uid, core.weight_version)
        return core.scheduler.memory.cached_tokens(key, namespace)

    async def store_prefix(
        self, token_ids: Sequence[int], *, cache_salt: str = "", adapter: str | None = None
    ) -> int:
        """Put the cached pages of these tokens into the engine's page stores, such as the one in
        ``prefix_cache_dir``; returns how many of the tokens these have then, from the first on.

        What is cached is stored anyway, a little later; this returns when it is. Raises InvalidRequest,
        EngineClosed, EngineFailed, WrongLoop.
        """
        return await self._serving().store(token_ids, cache_salt, adapter)

    # -- adapters -------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        runtime = self._serving()
        try:
            return await runtime.adapters.load(name, path)
        finally:
            runtime.observers.changed()

    async def unload_adapter(self, name: str) -> None:
        runtime = self._serving()
        try:
            await runtime.adapters.unload(name)
        finally:
            runtime.observers.changed()

    def adapters(self) -> list[AdapterInfo]:
        loaded = self._core.adapters.loaded.values()
        return [] if self.closed else [version.info for version in loaded]

    # -- weights --------------------------------------------------------------------------------

    async def update_weights(
        self, source: WeightSource, *, mode: UpdateMode = "keep", version: int | None = None
    ) -> int:
        """Go on with other weights of the same model, without a restart; returns their version.

        Everything is read and checked on a worker thread while requests go on, and nothing is changed
        unless all of it is right. Then no step is launched until the weights are written, in the memory of
        those before: for that long every stream waits. Requests go on from the tokens that they have:
        their KV is computed again, prefixes cached before are not found any more, and chunks say which
        version computed them. Several updates take place in their order. Cancelled before it begins to
        write, it changes nothing; later, it is completed first. docs/weights.md says what a source may leave
        out.

        Args:
            source: a checkpoint with the same architecture and shapes, as the model was loaded from; or a
                mapping or an iterable of names and tensors of torch, as ``state_dict()`` has them. Tensors
                are read until this returns or raises, and not longer.
            mode: what becomes of requests that have begun. "keep": they go on with the new weights.
                "wait": they finish first, and those that arrive wait in the queue. "abort": they end with
                :class:`~aioinfer.Cancelled`.
            version: of the weights, greater than the present one; None: that and one.

        Raises:
            ConfigError: the weights are not those of this model, and the message names the tensor; or an
                argument is none.
            OutOfMemory: there is no memory for what is copied on the way. Nothing has changed.
            EngineClosed, EngineFailed, WrongLoop: the engine does not serve.
        """
        runtime = self._serving()
        try:
            return await runtime.updates.update(source, mode, version)
        finally:
            runtime.observers.changed()

    @property
    def weight_version(self) -> int:
        """The number of times the weights were replaced since the start, or the version that was given
        then. Raises EngineClosed before the start."""
        return self._core.weight_version

    # -- observing ------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._idle if self._runtime is None else self._runtime.state

    @property
    def info(self) -> DeviceInfo:
        """Limits of model and device, and what was decided at the start: implementation, kernels, memory.

        Raises EngineClosed before the engine was started.
        """
        return honest(self._core.info, self.sentences)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one. Raises EngineClosed before the start."""
        return self._core.tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """The formats of tool calls and reasoning of the model, and what its chat template reads."""
        return self._chat_format

    def stats(self) -> EngineStats:
        """A snapshot, cheap enough to take every second. Raises EngineClosed before the start."""
        return self._started().stats()

    @property
    def measuring(self) -> Measuring:
        """Source of the metrics; histograms count from the first look at it on."""
        if self._measuring is None:
            from aioinfer.observe.metrics.measuring import Measuring

            self._measuring = Measuring()
            if self._runtime is not None and self._loop is not None:
                self._runtime.measure(self._measuring)
        return self._measuring

    def observe(self, observer: Observer) -> None:
        """Tell an observer of requests and steps, until the engine is closed. Raises EngineClosed before the
        start."""
        self._started().observers.add(observer)

    @property
    def timeline(self) -> Timeline:
        """Recent events of loop, launch thread and device. Raises EngineClosed before the start."""
        return self._started().launcher.timeline

    @property
    def _core(self) -> Core:
        return self._started().core

    def _started(self) -> Runtime:
        """The runtime, which a closed engine keeps. Raises EngineClosed before the start."""
        if self._runtime is None:
            if self._idle is not EngineState.NEW:
                require_process(self._process)
            raise not_started("engine", self.state)
        return self._runtime

    def _serving(self) -> Runtime:
        """The runtime, if it accepts requests. Raises EngineClosed, EngineFailed, WrongLoop."""
        if self._starting is not None:
            require_process(self._process)
            require_loop(self._starting)
        runtime = self._started()
        runtime.check_serving()
        return runtime


def _in_context(progress: Progress) -> Progress:
    """The callable, with the context of this moment wherever it is called; several threads may call it."""
    context = contextvars.copy_context()
    return lambda *stage: context.copy().run(progress, *stage)


async def _leave(launcher: Launcher | None, intake: Intake) -> None:
    """Close the parts of an engine that does not start: each of them, whatever another one raises. That is
    logged; the start raises what it failed with."""
    try:
        async with AsyncExitStack() as parts:
            parts.push_async_callback(intake.aclose)
            if launcher is not None:
                parts.push_async_callback(launcher.aclose)
    except Exception:
        _log.exception("an engine that did not start could not be closed cleanly")
