"""Random dispatchers of toy engines behind a simulated wire, and what is done to them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import AioInferError, EngineFailed
from aioinfer.execution.device import DeviceLost
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.policies import POLICIES
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Attempt, Replica, ReplicaEvents, ReplicaState, Wanted
from aioinfer.parallel.rows import Ending, Rows
from aioinfer.params import SamplingParams
from aioinfer.testing import TimedLauncher
from tests.engine.worlds import (
    VOCAB,
    World,
    random_drafting,
    random_params,
    random_prefills,
    random_switches,
    verify,
)
from tests.parallel.framed import FramedDispatcher, FramedReplica
from tests.toys import ToyDevice, ToyTokenizer

#: of every toy
LONGEST = 60
#: seconds in which replicas are lost: behind these every stream must end by itself
_DISTURBED = 2.0


class Wire(ReplicaEvents):
    """Delivers what a replica reports late, in order; at random twice."""

    def __init__(self, events: ReplicaEvents, dice: random.Random) -> None:
        self._events = events
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self._sent: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._delay = dice.choice([0.0, 0.0005, 0.005])
        self._doubling = dice.choice([0.0, 0.0, 0.2])
        #: nothing arrives any more
        self.cut = False
        self.counts: Counter[str] = Counter()

    def moved(self, rows: Sequence[tuple[Attempt, Rows]]) -> None:
        self._send(self._events.moved, rows)

    def adapted(self) -> None:
        self._send(self._events.adapted)

    def leaving(self, replica: Replica) -> None:
        self._send(self._events.leaving, replica)

    def lost(self, replica: Replica, cause: BaseException) -> None:
        self._send(self._events.lost, replica, cause)

    def _send(self, deliver: Callable[..., None], *what: Any) -> None:
        if self.cut:
            self.counts["cut off"] += 1
            return
        self._free_at = max(self._free_at, self._loop.time() + self._dice.uniform(0, self._delay))
        self._sent.append((deliver, what))
        self._loop.call_at(self._free_at, self._arrive)
        if self._dice.random() < self._doubling:
            self.counts["twice"] += 1
            later = self._free_at + self._dice.uniform(0, 0.02)
            self._loop.call_at(later, self._deliver, deliver, *what)

    def _arrive(self) -> None:
        """The oldest: timers of about the same time need not come in the order of their times."""
        deliver, what = self._sent.popleft()
        self._deliver(deliver, *what)

    def _deliver(self, deliver: Callable[..., None], *what: Any) -> None:
        if not self.cut:
            deliver(*what)


class WiredReplica(LocalReplica):
    """A replica that is far away: what is asked of it arrives late, too."""

    def __init__(self, engine: Engine, name: str, dice: random.Random) -> None:
        super().__init__(engine, name)
        self._dice = dice
        self._reach = dice.choice([0.0, 0.001, 0.01])
        self.wire: Wire | None = None
        #: does not notice that nobody listens
        self.zombie = False

    async def start(self, events: ReplicaEvents) -> None:
        if self.wire is not None:
            self.wire.cut = True  # a new connection
        self.wire = Wire(events, self._dice)
        self.zombie = False
        await super().start(self.wire)

    def submit(self, attempt: Attempt, *rest: Any) -> None:
        wire = self.wire
        assert wire is not None

        def arrive() -> None:
            if attempt.ended or wire is not self.wire:
                return
            try:
                super(WiredReplica, self).submit(attempt, *rest)
            except AioInferError as error:
                if self.engine.ready:
                    refused = Rows(0, 0, ending=Ending("abort", error=error))
                    wire.moved([(attempt, refused)])
                else:
                    wire.lost(self, error)

        asyncio.get_running_loop().call_later(self._dice.uniform(0, self._reach), arrive)

    def abort(self, attempt: Attempt) -> None:
        if not self.zombie:
            super().abort(attempt)


class WiredDispatcher(Dispatcher):
    """A dispatcher whose replicas are far away."""

    def __init__(self, *arguments: Any, dice: random.Random, **options: Any) -> None:
        self._dice = dice
        super().__init__(*arguments, **options)

    def _replica_of(self, engine: Engine, name: str) -> LocalReplica:
        return WiredReplica(engine, name, self._dice)


class _NoDevice:
    """For lifetimes, which ask whether the device is lost: some are, now and then."""

    lost = True


def toy_engine(seed: int, shared: dict[str, Any], *, other: bool = False) -> Engine:
    """``other``: with another arithmetic, as far as it says."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    num_pages = -(-LONGEST // page_size) + rng.randint(0, 100) // page_size
    drafting, drafter = random_drafting(random.Random(seed + 5))
    switches = random_switches(rng)
    config = EngineConfig(
        model="toy",
        page_size=page_size,
        max_running_requests=rng.randint(1, 8),
        max_step_tokens=8 + rng.choice([0, 3, 30]),
        chunk_size=rng.choice([3, 8, 64]),
        overlap_steps=rng.choice([0, 1, 2]),
        mixed=rng.random() < 0.7,
        prefix_cache=rng.random() < 0.7,
        quantization="int8" if other else "auto",
        **drafting,
        **(switches | shared),
    )
    dice = random.Random(seed + 1)

    def launcher(_: EngineConfig) -> TimedLauncher:
        device = ToyDevice(
            num_pages=num_pages,
            page_size=page_size,
            num_slots=config.num_slots,
            vocab_size=VOCAB,
            max_model_len=LONGEST,
            snapshots=None,
        )
        return TimedLauncher(
            device, lambda step: dice.choice([0.0, 0.001, 0.01, 0.03]) + 1e-4 * step.num_tokens
        )

    tokenizer = ToyTokenizer(VOCAB, looks_up=rng.random() < 0.5)
    return Engine(config, launcher=launcher, tokenizer=lambda _: tokenizer, drafter=drafter)


def make_dispatcher_world(seed: int) -> tuple[World, Dispatcher]:
    """Up to four toys, a policy, a wire, and dice."""
    rng = random.Random(seed)
    shared: dict[str, Any] = {
        "seed": seed,
        "policy": rng.choice(["fcfs", "priority", "lpm"]),
        "max_queued_requests": rng.choice([3, *[1000] * 5]),
        "max_queued_tokens": rng.choice([300, *[100_000] * 5]),
    }
    count = rng.choice([1, 2, 3, 3, 4])
    others = rng.random() < 0.3
    engines = [toy_engine(seed * 10 + n, shared, other=others and n % 2 == 1) for n in range(count)]
    policies = list(POLICIES)
    options: dict[str, Any] = {
        "policy": policies[seed % len(policies)],
        "on_loss": rng.choice([*["continue"] * 6, "identical", "identical", "fail"]),
    }
    kind = rng.random()
    wired, dice = kind < 0.7, random.Random(seed + 9)
    dispatcher: Dispatcher
    if kind < 0.4:
        dispatcher = FramedDispatcher(engines, dice=dice, **options)
    elif wired:
        dispatcher = WiredDispatcher(engines, dice=dice, **options)
    else:
        dispatcher = Dispatcher(engines, **options)
    single: Any = dispatcher
    nothing: Any = None
    world = World(rng, single, _NoDevice(), nothing, longer_params, verify, random_prefills)
    world.counts["worlds with a wire"] += wired
    world.counts["worlds with frames"] += isinstance(dispatcher, FramedDispatcher)
    return world, dispatcher


def longer_params(rng: random.Random) -> SamplingParams:
    """Outputs that something can happen to."""
    return random_params(rng).changed(max_tokens=rng.choice([2, 20, 40, 40]))


def check_loads(dispatcher: Dispatcher) -> None:
    """What is counted of each replica is what its attempts have."""
    running = dispatcher._started()
    attempts = {*running.attempts.values()}
    counted: set[Attempt] = set()
    for replica in dispatcher._replicas:
        load = replica.load
        own = list(load.attempts.values())
        assert not any(attempt.ended for attempt in own)
        assert all(attempt.replica is replica for attempt in own)
        assert load.backlog == sum(attempt.uncached for attempt in own)
        assert load.resuming == sum(attempt.uncached for attempt in own if attempt.resumes)
        assert load.tokens == sum(attempt.tokens for attempt in own)
        pages = Counter(page for attempt in own for page in attempt.pages)
        assert load.pages == pages
        counted |= {*own}
    assert counted == attempts
    queued = [record for record in running.open.values() if record.queued is not None]
    assert len(queued) == len(running.queue)
    assert running.queue.tokens == sum(record.known for record in queued)
    for record in running.open.values():
        assert isinstance(record, Record)
        assert len(record.losses) < 2
        assert record not in running.attempts or record.queued is None


async def disturb(world: World, dispatcher: Dispatcher) -> None:
    """Replicas are lost, come back, leave and join, and somebody looks at the figures."""
    running = dispatcher._started()
    dice = random.Random((dispatcher.config.seed or 0) + 7)
    counts = world.counts
    kinds, weights = (["kill", "zombie", "restart", "roll", "pause", "flush", "look"],
                      [4, 1, 12, 2, 2, 1, 2])  # fmt: skip
    while asyncio.get_running_loop().time() < _DISTURBED:
        await asyncio.sleep(dice.expovariate(1 / 0.03))
        what = dice.choices(kinds, weights)[0]
        ready = [each for each in dispatcher._replicas if each.state is ReplicaState.READY]
        lost = [each for each in dispatcher._replicas if each.state is ReplicaState.LOST]
        if what in ("kill", "zombie") and len(ready) == 1 and dice.random() < 0.9:
            continue  # else most worlds would have no replica for most of the time
        if what == "kill" and ready:
            for replica in dice.sample(ready, min(len(ready), dice.choice([1, 1, 1, 1, 1, 2]))):
                kill(replica, dice)
                counts["replicas lost"] += 1
        elif what == "zombie" and ready and isinstance(ready[0], FramedReplica):
            counts["replicas that hang"] += 1
            hanging = dice.choice(ready)
            assert isinstance(hanging, FramedReplica)
            hanging.hang()
        elif what == "zombie" and ready and isinstance(ready[0], WiredReplica):
            replica = dice.choice(ready)
            assert isinstance(replica, WiredReplica)
            replica.zombie = True
            running.lost(replica, DeviceLost("no frame for a while"))
            counts["zombies"] += 1
        elif what == "restart" and lost:
            await dispatcher.restart(dice.choice(lost).name)
            counts["restarts"] += 1
        elif what == "roll" and len(ready) > 1:
            counts["replicas rolled"] += 1
            roll = asyncio.ensure_future(dispatcher.restart(dice.choice(ready).name))
            await asyncio.sleep(dice.uniform(0, 0.05))
            if dice.random() < 0.3:  # a death during the drain
                left = [each for each in dispatcher._replicas if each.state is ReplicaState.READY]
                if left:
                    kill(dice.choice(left), dice)
            await roll
        elif what == "pause" and ready:
            paused = dice.choice(ready)
            await paused.pause()
            await asyncio.sleep(dice.choice([0, 0.01]))
            paused.resume()
        elif what == "flush" and ready:
            dispatcher.flush_cache()
        check_loads(dispatcher)
        check_sums(dispatcher)


def kill(replica: Replica, dice: random.Random) -> None:
    """Its device is gone; of what it had on the wire, all arrives or nothing."""
    if isinstance(replica, FramedReplica):
        replica.die()
        return
    if isinstance(replica, WiredReplica) and dice.random() < 0.5:
        wire = replica.wire
        assert wire is not None
        wire.cut = True
        events = wire._events
        asyncio.get_running_loop().call_later(
            dice.choice([0.0, 0.01]), events.lost, replica, DeviceLost("its connection is gone")
        )
    assert isinstance(replica, LocalReplica)
    runtime = replica.engine._runtime
    assert runtime is not None
    runtime.lost(DeviceLost("the device is lost"))


def may_fail(dispatcher: Dispatcher, record: Record, error: EngineFailed) -> bool:
    """Consumers see no loss while a replica is left that could go on."""
    running = dispatcher._started()
    if (
        dispatcher._on_loss == "fail"
        or len(record.losses) >= 2
        or record.unbegun >= 4
        or not running.placing.alive
    ):
        return True
    return dispatcher._on_loss == "identical" and not running.placing.computes(
        record, Wanted(record.output.numerics, record.output.newest_version), soon=True
    )


def check_sums(dispatcher: Dispatcher) -> None:
    stats = dispatcher.stats()
    each = [found.stats for found in stats.replicas if found.stats is not None and found.state != "lost"]
    for name in ("running", "steps", "output_tokens", "pages_total", "pages_free", "retractions"):
        assert getattr(stats, name) == sum(getattr(found, name) for found in each), name
    assert stats.waiting >= sum(found.waiting for found in each)
    assert stats.ready_replicas == sum(found.state == "ready" for found in stats.replicas)
