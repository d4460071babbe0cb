"""Dispatcher: several engines that look like one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from aioinfer.chat.answers import ChatFormat
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.config import EngineConfig
from aioinfer.config.server import EXCHANGE_GIB, PREFILL_TOKENS
from aioinfer.embeddings.embedding import honest
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError, EngineError, shown
from aioinfer.loop.belonging import asyncio_loop, require_loop
from aioinfer.loop.clock import clock_of
from aioinfer.loop.intake import Intake
from aioinfer.loop.observing import observe
from aioinfer.loop.updating import UpdateMode, WeightSource
from aioinfer.loop.waiting import apart
from aioinfer.outputs import AdapterInfo
from aioinfer.parallel.dispatching import Dispatching
from aioinfer.parallel.exchange import checked_gib
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.membership import Membership
from aioinfer.parallel.placing import Placing
from aioinfer.parallel.policies import RoutingPolicy, routing_policy
from aioinfer.parallel.remote_replicas import remote_replicas
from aioinfer.parallel.replica import ReplicaState, close_all
from aioinfer.parallel.roles import checked_roles, checked_tokens
from aioinfer.parallel.sending import OnLoss
from aioinfer.parallel.served_model import ServedModel, bring_up, check_same_model
from aioinfer.parallel.stats import DispatcherStats
from aioinfer.parallel.supervisor import Supervisor
from aioinfer.params import SamplingParams
from aioinfer.request import check_timeout

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo, Progress
    from aioinfer.observe.metrics.measuring import Measuring
    from aioinfer.observe.timeline import Timeline
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Dispatcher"]

_log = logging.getLogger("aioinfer")


class Dispatcher(Membership):
    """Several engines of one model, used as one.

    ::

        engines = [Engine(EngineConfig(model=..., device=f"cuda:{index}")) for index in range(4)]
        async with Dispatcher(engines) as dispatcher:
            async for chunk in dispatcher.generate("Once upon a time"):
                print(chunk.text, end="")

    It has everything that an :class:`~aioinfer.Engine` has. Requests wait in one queue and go to the engine
    that the policy chooses, once that has room. When an engine is lost, its streams go on in others, from the
    token that was delivered last: see ``on_loss``. The engines are started and closed with it, and belong to
    it meanwhile.
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        config: EngineConfig | None = None,
        processes: int = 0,
        ray: str | None = None,
        addresses: Sequence[str] = (),
        token: str = "",
        policy: str | RoutingPolicy = "prefix",
        on_loss: OnLoss = "continue",
        roles: Sequence[str] = (),
        prefill_tokens: int = PREFILL_TOKENS,
        exchange_gib: float = EXCHANGE_GIB,
    ) -> None:
        """``policy``: round_robin, total_requests, total_tokens, prefix, p2c, hash, or a
        :class:`~aioinfer.parallel.RoutingPolicy`.

        ``on_loss``: what becomes of a stream whose engine is lost. "continue": it goes on, preferably where
        its tokens will be exactly those that would have come, else with the same prompt and output
        (``Result.identical`` tells); "identical": it goes on where they are, or fails; "fail": it fails.
        A request that two engines in turn were lost with, before its next token, fails.

        ``processes``: the number of engines with ``config`` in child processes, instead of ``engines`` on
        this loop. They are started again when they are lost, with growing pauses where that does not help. On
        a CPU they share its cores, and of several GPUs each has one.

        ``ray``: a Ray cluster, "auto" or HOST:PORT, that places these engines on its nodes instead, each with
        a GPU or a share of the CPUs.

        ``addresses``: instead of these, replicas that run already (``aioinfer replica``), by HOST:PORT or the
        path of a Unix socket, with their ``token``. ``config`` says which model it is, for prompts and chats
        here. One that is lost is connected to again, for as long as it takes.

        ``roles``: of each engine "prefill", "decode" or "both", so that long prompts and streams are computed
        apart: prompts with ``prefill_tokens`` to compute, or more, go to the first kind, all else to the
        second. A stream goes on in the second kind when its prompt is computed, with its KV, which engines
        leave for each other in up to ``exchange_gib`` GiB of memory.

        Limits, deadlines, ``policy`` "priority" and ``seed`` are those of the first engine's config, and
        count for all together; other queue policies order what waits in an engine. Raises ConfigError.
        """
        remote = remote_replicas(engines, config, processes, ray, addresses, token)
        given = isinstance(engines, Sequence) and len(engines) > 0
        if not (remote or (given and all(isinstance(each, Engine) for each in engines))):
            raise ConfigError(f"engines must be one or more Engines, got {shown(engines)}")
        if len({id(each) for each in engines}) < len(engines):
            raise ConfigError("engines: one is there twice")
        if on_loss not in get_args(OnLoss):
            raise ConfigError(f"on_loss must be one of {', '.join(get_args(OnLoss))}, got {shown(on_loss)}")
        super().__init__()
        self._roles = checked_roles(roles, len(engines) + len(remote))
        self._prefill_tokens = checked_tokens(prefill_tokens)
        self._exchange_gib = checked_gib(exchange_gib)
        self.config = engines[0].config if engines else config or EngineConfig()
        self.default_params, self.sentences = SamplingParams(), Sentences()
        self._policy = routing_policy(policy, self.config.seed)
        self._on_loss: OnLoss = on_loss
        self._replicas = [
            self._replica_of(engine, f"local-{number}") for number, engine in enumerate(engines)
        ]
        self._replicas += remote
        for replica, role in zip(self._replicas, self._roles, strict=True):
            replica.role = role
        self._supervisor: Supervisor | None = None
        self._named = len(engines)
        self._chat_format = ChatFormat()
        self._idle = EngineState.NEW
        self._closing: asyncio.Task[None] | None = None
        self._model: ServedModel

    # -- life -----------------------------------------------------------------------------------

    async def start(self, progress: Progress | None = None) -> None:
        """Start the engines that are not started, one by one, and begin to serve on the running loop.

        Raises as :meth:`aioinfer.Engine.start`, and ConfigError for engines of different models. Then, and
        when it is cancelled, all of them are closed.
        """
        await apart(self._start(asyncio_loop(), progress), "aioinfer-starting")

    async def _start(self, loop: asyncio.AbstractEventLoop, progress: Progress | None) -> None:
        if self._running is not None:
            self._running.check_process()
        await self._forget_dead_loop()
        if self.state not in (EngineState.NEW, EngineState.CLOSED):
            raise EngineError(f"the dispatcher cannot be started: it is {self.state.value}")
        self._running, self._closing, self._idle = None, None, EngineState.STARTING
        self._paused = False
        try:
            running = await self._begin(loop, progress)
            self._past.clear()
            for replica in self._replicas:
                replica.past.clear()
            await running.adapters.reconcile()
            for replica in self._replicas:
                await replica.start(running)
            self._running = running
        except BaseException:
            self._running, self._idle = None, EngineState.CLOSED
            try:
                await close_all(self._replicas)
            except Exception:
                _log.exception("an engine of a dispatcher that did not start could not be closed")
            self._close_exchange()
            raise
        self._supervisor = Supervisor(self.restart)
        self._running.when_lost = self._supervisor.lost
        if self._measuring is not None:
            running.measure(self._measuring, self.stats)
        observe(running, self.config, self.stats)

    async def _begin(self, loop: asyncio.AbstractEventLoop, progress: Progress | None) -> Dispatching:
        from aioinfer.loop.factory import import_parts

        intake = Intake(loop)
        try:
            await intake.run(import_parts, self.config.policy)
            await intake.run(self._open_exchange)
            model = self._model = await bring_up(self.config, self._replicas, intake, progress)
            for replica in self._replicas[1:]:
                check_same_model(replica, self._replicas[0].info)
            running = Dispatching(
                self.config,
                Placing(self._replicas, self._policy, self._prefill_tokens),
                intake,
                model.info,
                model.tokenizer,
                clock_of(loop),
                on_loss=self._on_loss,
            )
            await intake.run(running.preparing.warm_up)
            running.share = self._share
        except BaseException:
            await intake.aclose()
            raise
        self.default_params, self.sentences = model.default_params, model.sentences
        self._chat_format = model.chat_format
        return running

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop serving, and close the engines. As :meth:`aioinfer.Engine.aclose`."""
        await self._forget_dead_loop()
        running = self._running
        if running is None or running.closed:
            if self.state is EngineState.STARTING:
                raise EngineError("the dispatcher is still starting")
            self._idle = EngineState.CLOSED
            if self._measuring is not None:
                self._measuring.closed()
            return
        require_loop(running.loop)
        if timeout != 0:
            check_timeout("timeout", timeout)
        running.state = EngineState.DRAINING
        if self._closing is None:
            seconds = self.config.drain_timeout if timeout is None else timeout
            closing = self._close(running, seconds if drain else 0.0)
            self._closing = running.loop.create_task(closing, name="aioinfer-closing")
        elif not drain:
            running.cut_short()
        await asyncio.shield(self._closing)

    async def _forget_dead_loop(self) -> None:
        """A dispatcher that outlived its loop is closed, and so are its engines."""
        running = self._running
        if running is not None and not running.closed and running.loop.is_closed():
            running.outlive_loop()
            for replica in self._replicas:
                replica.outlive_loop()
            try:
                await close_all(self._replicas)
            finally:
                self._close_exchange()

    async def _close(self, running: Dispatching, drain: float) -> None:
        if self._supervisor is not None:
            await self._supervisor.aclose()
        try:
            await running.close(drain, self._replicas)
        finally:
            self._close_exchange()

    # -- pausing --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """As :meth:`aioinfer.Engine.pause`, of all engines."""
        running = self._serving()
        self._paused = True
        await asyncio.gather(*(each.pause() for each in running.placing.ready))
        running.check_serving()

    def resume(self) -> None:
        """As :meth:`aioinfer.Engine.resume`, of all engines."""
        self._paused = False
        if self._running is not None:
            self._running.check_loop()
            for replica in self._running.placing.replicas:
                if replica.state in (ReplicaState.READY, ReplicaState.DRAINING):
                    replica.resume()

    def flush_cache(self) -> int:
        """As :meth:`aioinfer.Engine.flush_cache`, of all engines."""
        return sum(each.flush_cache() for each in self._serving().placing.ready)

    # -- adapters -------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """As :meth:`aioinfer.Engine.load_adapter`, on every replica; ``path`` is one that all of them see.

        Where one refuses, and when this is cancelled, all have what they had before. Replicas that start
        later load it, too. A request that still waits for a replica gets what its name stands for when it is
        sent.
        """
        return await self._serving().adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """As :meth:`aioinfer.Engine.unload_adapter`, on every replica. Requests that still wait for one end
        with InvalidRequest."""
        await self._serving().adapters.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """As :meth:`aioinfer.Engine.adapters`: those that a replica has, or will have when it has started."""
        return self._started().adapters.all()

    # -- weights --------------------------------------------------------------------------------

    async def update_weights(
        self, source: WeightSource, *, mode: UpdateMode = "keep", version: int | None = None
    ) -> int:
        """As :meth:`aioinfer.Engine.update_weights`, of one engine of this process after the other, so
        that the others serve meanwhile. Updates happen in the order of the calls. One that is lost meanwhile
        does not count; one that joins, or is restarted, later has the weights of its checkpoint.

        What the first engine refuses, none gets, and it is raised. Where a later one does, and when this is
        cancelled on the way, versions differ: EngineError says how, and the same call with the ``version``
        that the others have updates the rest. While versions differ, only a checkpoint is accepted, or
        what the others have got last; tensors may be some of all.

        Raises ConfigError, before anything is changed, if an engine is in another process.
        """
        return await self._serving().weights.update(source, mode, version)

    @property
    def weight_version(self) -> int:
        """Newest weight version among the replicas."""
        return self._serving().weights.newest

    # -- observing ------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """FAILED while no replica is left; it is RUNNING again when one joins."""
        return self._idle if self._running is None else self._running.state

    @property
    def ready(self) -> bool:
        """Requests are accepted."""
        running = self._running
        return running is not None and running.state is EngineState.RUNNING and bool(running.placing.ready)

    @property
    def degraded(self) -> bool:
        """Some replicas do not take requests: they are lost or silent, or start, or drain."""
        return not all(each.takes_work for each in self._replicas)

    @property
    def info(self) -> DeviceInfo:
        """Device of the first replica."""
        return honest(self._started().info, self.sentences)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """As :attr:`aioinfer.Engine.tokenizer`."""
        return self._started().tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """As :attr:`aioinfer.Engine.chat_format`."""
        return self._chat_format

    def stats(self) -> DispatcherStats:
        """The sum over the replicas, and each of them. Raises EngineClosed before the start."""
        running = self._started()
        queue = running.queue
        return DispatcherStats.sum_of(
            self._replicas,
            self._model.stats,
            self._past,
            state=running.state.value,
            arriving=running.arriving,
            sessions=len(running.seats.taken),
            waiting=len(queue),
            waiting_tokens=queue.tokens,
            resumed=running.resumed,
            diverged=running.diverged,
            resume_seconds=running.resume_seconds,
            handovers=running.handovers.done,
            handovers_without_pages=running.handovers.without_pages,
        )

    @property
    def timeline(self) -> Timeline:
        """Timeline of the first engine; each has its own, and those in other processes keep theirs. Raises
        EngineClosed before the start."""
        self._started()
        first = self._replicas[0]
        return first.engine.timeline if isinstance(first, LocalReplica) else self._model.timeline

    @property
    def measuring(self) -> Measuring:
        """As :attr:`aioinfer.Engine.measuring`."""
        if self._measuring is None:
            from aioinfer.observe.metrics.measuring import Measuring

            self._measuring = Measuring()
            if self._running is not None and not self._running.closed:
                self._running.measure(self._measuring, self.stats)
        return self._measuring
