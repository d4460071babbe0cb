"""Membership: the replicas of a dispatcher, which are added, removed and restarted while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aioinfer.client.engine_like import EngineLike
from aioinfer.config.server import EXCHANGE_GIB
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError, EngineClosed, shown
from aioinfer.loop.service import not_started
from aioinfer.loop.waiting import apart
from aioinfer.parallel.dispatching import Dispatching
from aioinfer.parallel.exchange import Exchange, ExchangeKind
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.replica import Replica, ReplicaState
from aioinfer.parallel.roles import Role, checked_role
from aioinfer.parallel.served_model import check_same_model
from aioinfer.parallel.stats import add_counts, counts_of

if TYPE_CHECKING:
    from aioinfer.observe.metrics.measuring import Measuring

__all__ = ["Membership"]


class Membership(EngineLike):
    """Base class of :class:`~aioinfer.parallel.Dispatcher`."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []
        self._running: Dispatching | None = None
        #: engines of this process that it was given so far
        self._named = 0
        #: replicas that are being restarted or removed
        self._changed: set[Replica] = set()
        #: counters of replicas that are gone
        self._past: dict[str, Any] = {}
        #: by request: engines that join are, too
        self._paused = False
        self._measuring: Measuring | None = None
        self._exchange_gib = EXCHANGE_GIB
        #: where replicas leave pages for each other, while it is needed
        self._exchange: Exchange | None = None

    # -- the exchange ---------------------------------------------------------------------------

    @property
    def _kind(self) -> ExchangeKind:
        if all(isinstance(each, LocalReplica) for each in self._replicas):
            return "memory"
        return "directory" if all(each.same_host for each in self._replicas) else "messages"

    def _open_exchange(self) -> None:
        """Make a place for pages if some replicas compute prompts for others. Blocks. Raises ConfigError."""
        if all(each.role == "both" for each in self._replicas):
            return
        self._exchange = Exchange(self._exchange_gib, self._kind)
        self._exchange.open()
        for replica in self._replicas:
            replica.exchange = self._exchange

    async def _share(self) -> None:
        """The same while they serve, for what moves. Raises ConfigError, EngineError."""
        running = self._started()
        async with running.sharing:
            if self._exchange is None:
                exchange = Exchange(self._exchange_gib, self._kind)
                try:
                    await running.use_file(exchange.open)
                    running.check_open()
                except BaseException:
                    exchange.close()
                    raise
                self._exchange = exchange
            for replica in running.placing.ready:
                if replica.exchange is None:
                    await replica.share(self._exchange)

    def _close_exchange(self) -> None:
        """When no engine serves."""
        exchange, self._exchange = self._exchange, None
        for replica in self._replicas:
            replica.exchange = None
        if exchange is not None:
            exchange.close()

    # -- replicas -------------------------------------------------------------------------------

    async def add(self, engine: Engine, *, role: str = "both") -> str:
        """Start another engine, and send requests to it; returns the name of the replica. ``role``: as in
        ``roles``.

        Raises as :meth:`start`, and EngineClosed.
        """
        return await apart(self._add(engine, checked_role(role)), "aioinfer-replica")

    async def _add(self, engine: Engine, role: Role) -> str:
        running = self._started()
        running.check_loop()
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine must be an Engine, got {shown(engine)}")
        if any(isinstance(each, LocalReplica) and each.engine is engine for each in self._replicas):
            raise ConfigError("the engine belongs to the dispatcher already")
        replica = self._replica_of(engine, f"local-{self._named}")
        self._named += 1
        replica.role = role
        self._replicas.append(replica)
        try:
            if role != "both":
                await self._share()
            await self._launch(running, replica)
        except BaseException:
            self._forget(replica)
            if replica in running.placing.replicas:
                running.placing.replicas.remove(replica)
            if not engine.closed and engine.state is not EngineState.STARTING:
                await replica.aclose()
            raise
        return replica.name

    async def remove(self, name: str) -> None:
        """Let the streams of a replica go on in others, and close its engine. Where there is no other one,
        wait for their ends first. Raises ConfigError: no such replica, or it is being changed."""
        await apart(self._remove(name), "aioinfer-replica")

    async def _remove(self, name: str) -> None:
        running = self._started()
        with self._changing(name) as replica:
            running.drain(replica)
            await running.emptied(replica)
            running.placing.replicas.remove(replica)
            running.left()
            try:
                await replica.aclose()
            finally:
                self._forget(replica)

    async def restart(self, name: str | None = None) -> None:
        """Close and start the engine of one replica, also one that is lost; or of all, one after the other.
        Streams go on in the others meanwhile. Raises as :meth:`remove` and :meth:`start`."""
        for each in [name] if name is not None else [replica.name for replica in self._replicas]:
            await apart(self._restart(each), "aioinfer-replica")

    async def _restart(self, name: str) -> None:
        running = self._started()
        with self._changing(name, restarting=True) as replica:
            running.drain(replica)
            await running.emptied(replica)
            try:
                await replica.aclose()
                await self._launch(running, replica)
            except BaseException as error:
                if not running.closing:
                    replica.state = ReplicaState.STARTING  # or was closed on the way there
                    running.lost(replica, error)
                raise

    def _forget(self, replica: Replica) -> None:
        add_counts(self._past, counts_of(replica))
        self._replicas.remove(replica)

    async def _launch(self, running: Dispatching, replica: Replica) -> None:
        """Start an engine, unless the dispatcher closes: it would outlive that; and send requests to it."""
        running.check_open()
        replica.exchange = self._exchange
        await replica.launch()
        await self._unless_closed(running, replica)
        check_same_model(replica, running.info)
        await self._join(running, replica)

    async def _unless_closed(self, running: Dispatching, replica: Replica) -> None:
        try:
            running.check_open()
        except EngineClosed:
            await replica.aclose()
            raise

    async def _join(self, running: Dispatching, replica: Replica) -> None:
        await running.adapters.catch_up(replica)
        await self._unless_closed(running, replica)
        await replica.start(running)  # at once: nothing is loaded or unloaded in between
        if replica not in running.placing.replicas:
            running.placing.replicas.append(replica)
        if self._measuring is not None:
            replica.follow(running.observers)
        if self._paused:
            await replica.pause()
        running.joined()

    @contextmanager
    def _changing(self, name: str, *, restarting: bool = False) -> Iterator[Replica]:
        """Reserve a replica for a restart or a removal. Raises ConfigError."""
        running = self._started()
        running.check_loop()
        running.check_open()
        replica = self._replica(name)
        if replica.state is ReplicaState.STARTING or replica in self._changed:
            raise ConfigError(f"the replica {name} is being started, restarted or removed already")
        self._changed.add(replica)
        replica.restarting = restarting
        try:
            yield replica
        finally:
            self._changed.discard(replica)
            replica.restarting = False

    def _replica_of(self, engine: Engine, name: str) -> LocalReplica:
        """Make the replica of an engine; tests put a wire between."""
        return LocalReplica(engine, name)

    def _replica(self, name: str) -> Replica:
        found = {each.name: each for each in self._replicas}
        if name not in found:
            raise ConfigError(f"there is no replica {shown(name)}; there are {', '.join(found)}")
        return found[name]

    def _started(self) -> Dispatching:
        if self._running is None:
            raise not_started("dispatcher", self.state)
        return self._running

    def _serving(self) -> Dispatching:
        running = self._started()
        running.check_serving()
        return running
