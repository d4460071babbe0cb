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

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.execution.device import DeviceLost, Progress
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.roles import checked_roles
from aioinfer.scheduling.costs import Costs, Sizes
from aioinfer.stream import Stream
from aioinfer.testing.virtual_time import Deadlock, VirtualLoop
from aioinfer.twin.columns import ColumnLauncher
from aioinfer.twin.device import TwinDevice, TwinLauncher
from aioinfer.twin.load import Load
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.playing import Player

if TYPE_CHECKING:
    from aioinfer.twin.virtual_trace import VirtualTrace

__all__ = ["Event", "Setup", "Twin", "simulate"]

#: samples over time that are kept; then every other one is dropped
_SAMPLES = 2000
#: seconds between two samples at most, and in which something happens to requests that are there
_PAUSE, _STUCK = 60.0, 20_000.0


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

    def check(self) -> None:
        """Raises ConfigError: roles or events that cannot be, or settings that are not simulated."""
        if self.config.speculation not in ("auto", "off") or self.config.prefix_cache_dir is not None:
            raise ConfigError("speculation and prefix_cache_dir are not simulated")
        checked_roles(self.roles, self.replicas)
        there, count = {*range(self.replicas)}, self.replicas
        # One that joins is there from then on, and not at once.
        for event in sorted(self.events, key=lambda event: (event.at, event.kind == "join")):
            if event.kind == "join":
                there.add(count)
                count += 1
            elif event.replica not in there:
                lost = f"there is no replica {event.replica} at {event.at:g} s; the first is 0"
                raise ConfigError(f"{event.kind}: {lost}")
            else:
                there.remove(event.replica)


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
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
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
        #: replicas that serve, and since when
        self._serving: dict[_TwinEngine, float] = {}

    async def play(self, load: Load, progress: Callable[[float, int], None] | None = None) -> Outcome:
        """As :func:`simulate`."""
        loop = asyncio.get_running_loop()
        async with self._server() as (server, engines):
            player = Player(server, outcome=self.outcome, arrives=self._arrives, trace=self._trace)
            self._zero = loop.time()
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(self._sample(engines, progress))
                events = [
                    group.create_task(self._happens(each, server, engines)) for each in self.setup.events
                ]
                await player.play(load)
                for each in (sampling, *events):
                    each.cancel()
            self._finish(engines)
        return self.outcome

    # -- what serves ----------------------------------------------------------------------------

    def engine(self) -> _TwinEngine:
        """Another replica, not started."""
        number = next(self._numbers)

        def launcher(config: EngineConfig) -> TwinLauncher:
            launched = self.launcher(TwinDevice(config, self.setup.costs.engine.get("max_model_len")), number)
            self.launchers.append(launched)
            return launched

        made = _TwinEngine(self._config, launcher=launcher, tokenizer=lambda _: None)
        made.costs = self.setup.costs
        return made

    def launcher(self, device: TwinDevice, number: int) -> TwinLauncher:
        """Of a replica that starts."""
        kind = TwinLauncher if self.setup.exact else ColumnLauncher
        setup = self.setup
        return kind(device, setup.costs, number=number, seed=setup.seed, trace=self._trace)

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[tuple[Any, list[_TwinEngine]]]:
        setup = self.setup
        engines = [self.engine() for _ in range(setup.replicas)]
        alone = setup.replicas == 1 and not setup.events
        server: Any = engines[0] if alone else Dispatcher(engines, policy=setup.routing, roles=setup.roles)
        await server.start()
        self._serving = dict.fromkeys(engines, 0.0)
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
            self._serving[engines[-1]] = event.at
            return
        if event.kind == "kill":
            server._supervisor = None  # it stays lost
            engines[event.replica]._started().lost(DeviceLost("killed"))
        else:
            await server.remove(f"local-{event.replica}")
        now = asyncio.get_running_loop().time() - self._zero
        self.outcome.served += now - self._serving.pop(engines[event.replica], now)

    def _arrives(self, tokens: int) -> None:
        """A request costs the host time; several replicas have several hosts."""
        fixed, token = self.setup.costs.host.arrive
        if len(self.launchers) == 1 and (fixed or token):
            self.launchers[0].catch_up()
            self.launchers[0].occupy(fixed + token * tokens)

    # -- figures --------------------------------------------------------------------------------

    async def _sample(
        self, engines: list[_TwinEngine], progress: Callable[[float, int], None] | None
    ) -> None:
        samples, pause, same = self.outcome.samples, 1.0, (0, 0.0)
        loop = asyncio.get_running_loop()
        while True:
            waiting = running = used = pages = done = 0
            for engine in engines:
                if engine.ready:
                    engine.catch_up()
                    done += engine._core.scheduler.queues.counters.steps
                    queues = engine._core.scheduler.queues
                    waiting, running = waiting + len(queues.waiting), running + len(queues.running)
                    pages += queues.memory.pages.total
                    used += queues.memory.pages.total - queues.memory.available
            samples.append((loop.time() - self._zero, waiting, running, used / pages if pages else 0.0))
            if len(samples) > _SAMPLES:
                del samples[1::2]
                pause = min(2 * pause, _PAUSE)
            if not (waiting or running) or done + len(self.outcome) != same[0]:
                same = done + len(self.outcome), loop.time()
            elif loop.time() > same[1] + _STUCK:
                raise Deadlock(f"{waiting + running} requests have waited in vain since {same[1]:.0f} s")
            if progress is not None:
                progress(samples[-1][0], len(self.outcome))
            await asyncio.sleep(pause)

    def _finish(self, engines: list[_TwinEngine]) -> None:
        outcome = self.outcome
        outcome.busy = sum(launcher.busy for launcher in self.launchers)
        for each in self.launchers:
            outcome.largest = Sizes(*map(max, outcome.largest, each.largest))
        outcome.served += sum(outcome.seconds - begun for begun in self._serving.values())
        for engine in engines:
            if engine._runtime is not None:
                counters = engine._core.scheduler.queues.counters
                outcome.steps += counters.steps
                outcome.retractions += counters.retractions


class _TwinEngine(Engine):
    """Catches up with its column before anything is asked of it."""

    costs: Costs | None = None

    def _step_costs(self, config: EngineConfig) -> Costs | None:
        return self.costs

    async def start(self, progress: Progress | None = None) -> None:
        await super().start(progress)
        launcher = self._started().launcher
        assert isinstance(launcher, TwinLauncher)
        launcher.runtime = self._started()

    def catch_up(self) -> None:
        launcher = None if self._runtime is None else self._runtime.launcher
        if isinstance(launcher, TwinLauncher):
            launcher.catch_up()

    def _queue(self, *arguments: Any) -> Stream:
        self.catch_up()
        return super()._queue(*arguments)


def _settled(setup: Setup) -> EngineConfig:
    """The config of each replica. Raises ConfigError."""
    setup.check()
    config = setup.config
    fixed: dict[str, Any] = {
        "model": "twin",
        "speculation": "off",
        "gc": "python",
        "switch_interval": 0.0,
        "seed": setup.seed,
        "costs": None,
        "refine_costs": False,
        "prefix_cache_dir": None,
    }
    measured = {
        each.name: setup.costs.engine.get(each.name)
        for each in dataclasses.fields(EngineConfig)
        if getattr(config, each.name) is None
    }
    return dataclasses.replace(config, **{**measured, **fixed})
