"""Running: plays a load to engines in virtual time.

It is the engine: scheduler, prefix cache, dispatcher and streams are those that serve, on a loop whose clock
jumps to the next timer. A :class:`~aioinfer.twin.device.TwinLauncher` stands for the device, and for what the
host takes between two steps. So two runs with the same seed take the same course, in any process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import AioInferError, ConfigError, Rejected
from aioinfer.execution.device import DeviceLost, Progress
from aioinfer.parallel import Dispatcher
from aioinfer.params import SamplingParams
from aioinfer.request import Output
from aioinfer.scheduling.costs import Costs
from aioinfer.stream import Stream
from aioinfer.testing.virtual_time import VirtualLoop
from aioinfer.twin.columns import ColumnLauncher
from aioinfer.twin.device import TwinDevice, TwinLauncher
from aioinfer.twin.load import ANSWER, Load, Pieces, Session, tokens_of
from aioinfer.twin.outcome import Outcome

if TYPE_CHECKING:
    from aioinfer.twin.virtual_trace import VirtualTrace

__all__ = ["Event", "Setup", "Twin", "simulate"]

#: samples over time that are kept; then every other one is dropped
_SAMPLES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What happens to the replicas at a moment, in seconds from the beginning: one is lost, one moves its
    streams to the others and leaves, or one more joins. ``replica``: its number, from 0 on."""

    at: float
    kind: Literal["kill", "drain", "join"]
    replica: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What serves a load. ``config``: settings of each replica, where these are open those of ``costs``."""

    costs: Costs
    config: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    replicas: int = 1
    #: the dispatcher's policy, and a role for each replica
    routing: str = "prefix"
    roles: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    #: every step apart; else decode steps between two events are one
    exact: bool = False
    seed: int = 0


def simulate(
    load: Load,
    setup: Setup,
    *,
    progress: Callable[[float, int], None] | None = None,
    trace: VirtualTrace | None = None,
) -> Outcome:
    """Play a load, and return what came of it. Blocks, and needs a thread without a running loop.

    ``progress`` is called with the virtual seconds and the number of requests that have ended, and ends the
    simulation by raising. Raises ConfigError.
    """
    loop = VirtualLoop(setup.seed)
    try:
        return loop.run_until_complete(Twin(setup, trace).play(load, progress))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class Twin:
    """Engines in virtual time. Belongs to the :class:`VirtualLoop` on which :meth:`play` runs."""

    def __init__(self, setup: Setup, trace: VirtualTrace | None = None) -> None:
        self.setup = setup
        self.outcome = Outcome()
        self.launchers: list[TwinLauncher] = []
        self._trace = trace
        self._config = _settled(setup)
        self._numbers = itertools.count()

    async def play(self, load: Load, progress: Callable[[float, int], None] | None = None) -> Outcome:
        """As :func:`simulate`."""
        loop = asyncio.get_running_loop()
        async with self._server() as (server, engines):
            self._zero = loop.time()
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(self._sample(engines, progress))
                events = [
                    group.create_task(self._happens(each, server, engines)) for each in self.setup.events
                ]
                async with asyncio.TaskGroup() as sessions:
                    for session in load:
                        if (left := self._zero + session.at - loop.time()) > 0:
                            await asyncio.sleep(left)
                        sessions.create_task(self._session(server, session))
                for each in (sampling, *events):
                    each.cancel()
            self._finish(engines, loop.time() - self._zero)
        return self.outcome

    # -- what serves ----------------------------------------------------------------------------

    def engine(self) -> _TwinEngine:
        """Another replica, not started."""
        number = next(self._numbers)

        def launcher(config: EngineConfig) -> TwinLauncher:
            costs = self.setup.costs
            device = TwinDevice(config, costs.engine.get("max_model_len"))
            kind = TwinLauncher if self.setup.exact else ColumnLauncher
            made = kind(device, costs.step, costs.host, number=number, trace=self._trace)
            self.launchers.append(made)
            return made

        return _TwinEngine(self._config, launcher=launcher, tokenizer=lambda _: None)

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[tuple[Any, list[_TwinEngine]]]:
        setup = self.setup
        engines = [self.engine() for _ in range(setup.replicas)]
        alone = setup.replicas == 1 and not setup.events
        server: Any = engines[0] if alone else Dispatcher(engines, policy=setup.routing, roles=setup.roles)
        await server.start()
        try:
            yield server, engines
        finally:
            await server.aclose()

    async def _happens(self, event: Event, server: Dispatcher, engines: list[_TwinEngine]) -> None:
        await asyncio.sleep(max(0.0, self._zero + event.at - asyncio.get_running_loop().time()))
        for each in engines:
            each.catch_up()
        if event.kind == "join":
            engines.append(self.engine())
            await server.add(engines[-1])
            return
        if event.replica >= len(engines):
            raise ConfigError(f"{event.kind}: there is no replica {event.replica}")
        if event.kind == "kill":
            server._supervisor = None  # it stays lost
            engines[event.replica]._started().lost(DeviceLost("killed"))
        else:
            await server.remove(f"local-{event.replica}")

    # -- requests -------------------------------------------------------------------------------

    async def _session(self, server: Any, session: Session) -> None:
        pieces: Pieces = ()
        options: dict[str, Any] = {**dict(session.options), "priority": session.priority}
        if session.name is not None:
            options["routing_key"] = session.name
        for turn in session.turns:
            if turn.think > 0:
                await asyncio.sleep(turn.think)
            pieces += turn.pieces
            params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True, temperature=0.0)
            try:
                self._arrives(pieces)
                stream = server.generate(tokens_of(pieces), params, **options)
            except AioInferError as error:
                self._refused(error, sum(tokens for _, tokens in pieces))
                return
            try:
                await stream
            except AioInferError as error:
                self._refused(error, sum(tokens for _, tokens in pieces))
                return
            self._ended(stream.cell.output)
            pieces += ((ANSWER, turn.output_tokens),)

    def _arrives(self, pieces: Pieces) -> None:
        fixed, token = self.setup.costs.host.arrive
        if len(self.launchers) == 1 and (fixed or token):
            self.launchers[0].occupy(fixed + token * sum(tokens for _, tokens in pieces))

    def _refused(self, error: AioInferError, tokens: int) -> None:
        outcome, now = self.outcome, asyncio.get_running_loop().time() - self._zero
        outcome.errors[type(error).__name__] += 1
        outcome.arrived.append(now)
        outcome.admitted.append(np.nan)
        outcome.first.append(np.nan)
        outcome.ended.append(now)
        outcome.prompt_tokens.append(tokens)
        outcome.cached_tokens.append(0)
        outcome.output_tokens.append(0)
        outcome.refused.append(error.retry_after if isinstance(error, Rejected) else 0.0)

    def _ended(self, output: Output) -> None:
        outcome, zero = self.outcome, self._zero
        times = np.asarray(output.token_times)
        outcome.arrived.append(output.arrival - zero)
        outcome.admitted.append((output.admitted_at or 0.0) - zero)
        outcome.first.append(times[0] - zero)
        outcome.ended.append(times[-1] - zero)
        outcome.prompt_tokens.append(len(output.prompt_ids))
        outcome.cached_tokens.append(output.cached_tokens)
        outcome.output_tokens.append(len(times))
        outcome.refused.append(0.0)
        outcome.itl.add(np.diff(times))
        if self._trace is not None:
            self._trace.request(str(len(outcome)), output.arrival - zero, float(times[-1]) - zero, len(times))

    # -- figures --------------------------------------------------------------------------------

    async def _sample(
        self, engines: list[_TwinEngine], progress: Callable[[float, int], None] | None
    ) -> None:
        samples, pause = self.outcome.samples, 1.0
        loop = asyncio.get_running_loop()
        while True:
            waiting = running = used = pages = 0
            for engine in engines:
                if engine.ready:
                    queues = engine._core.scheduler.queues
                    waiting, running = waiting + len(queues.waiting), running + len(queues.running)
                    pages += queues.memory.pages.total
                    used += queues.memory.pages.total - queues.memory.available
            samples.append((loop.time() - self._zero, waiting, running, used / pages if pages else 0.0))
            if len(samples) > _SAMPLES:
                del samples[1::2]
                pause *= 2
            if progress is not None:
                progress(samples[-1][0], len(self.outcome))
            await asyncio.sleep(pause)

    def _finish(self, engines: list[_TwinEngine], seconds: float) -> None:
        outcome = self.outcome
        outcome.seconds = seconds
        outcome.busy = sum(launcher.busy for launcher in self.launchers)
        outcome.served += seconds * len(engines)
        for engine in engines:
            if engine._runtime is not None:
                counters = engine._core.scheduler.queues.counters
                outcome.steps += counters.steps
                outcome.retractions += counters.retractions


class _TwinEngine(Engine):
    """Catches up with its column before anything is asked of it."""

    async def start(self, progress: Progress | None = None) -> None:
        await super().start(progress)
        launcher = self._started().launcher
        if isinstance(launcher, ColumnLauncher):
            launcher.runtime = self._started()

    def catch_up(self) -> None:
        if self._runtime is not None and isinstance(self._runtime.launcher, ColumnLauncher):
            self._runtime.launcher.catch_up()

    def _queue(self, *arguments: Any) -> Stream:
        self.catch_up()
        return super()._queue(*arguments)


def _settled(setup: Setup) -> EngineConfig:
    """The config of each replica. Raises ConfigError."""
    config = setup.config
    fixed: dict[str, Any] = {
        "model": "twin",
        "speculation": "off",
        "gc": "python",
        "switch_interval": 0.0,
        "seed": setup.seed,
        "costs": None,
        "prefix_cache_dir": None,
    }
    names = {each.name for each in dataclasses.fields(EngineConfig)}
    measured = {name: value for name, value in setup.costs.engine.items() if name in names}
    default = EngineConfig()
    open_ones = {
        name: value
        for name, value in measured.items()
        if getattr(config, name) is None or getattr(config, name) == getattr(default, name)
    }
    return dataclasses.replace(config, **{**open_ones, **fixed})
