"""Random dispatchers of toy engines, most behind sockets of memory, and what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from aioinfer.engine import Engine
from aioinfer.errors import EngineClosed, EngineFailed, InvalidRequest, Rejected
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.policies import POLICIES
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Attempt, Replica, ReplicaState, Wanted
from aioinfer.params import SamplingParams
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
from tests.parallel.toys import Toy, lose_engine
from tests.toys import ToyTokenizer, toy_generate

#: of every toy
LONGEST = 60
#: that are looked at, and their last values
COUNTERS = ("steps", "output_tokens", "retractions", "device_busy")
LAST: WeakKeyDictionary[Dispatcher, dict[str, float]] = WeakKeyDictionary()
#: seconds in which replicas are lost: behind these every stream must end by itself
_DISTURBED = 2.0


class _NoDevice:
    """For lifetimes, which ask whether the device is lost: some are, now and then."""

    lost = True


def toy_engine(
    seed: int, shared: dict[str, Any], *, other: bool = False, with_roles: int | None = None
) -> Engine:
    """``other``: with another arithmetic, as far as it says. ``with_roles``: the size of pages that it gives
    to others; 0: of its own."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    page_size = with_roles or page_size
    num_pages = -(-LONGEST // page_size) + rng.randint(0, 100) // page_size
    drafting, drafter = random_drafting(random.Random(seed + 5))
    switches = random_switches(rng)
    dice, looks_up = random.Random(seed + 1), rng.random() < 0.5
    return Toy(
        seconds=lambda step: dice.choice([0.0, 0.001, 0.01, 0.03]) + 1e-4 * step.num_tokens,
        longest=LONGEST,
        vocab_size=VOCAB,
        tokenizer=lambda: ToyTokenizer(VOCAB, looks_up=looks_up),
        drafter=drafter,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=rng.randint(1, 8),
        max_step_tokens=8 + rng.choice([0, 3, 30]),
        chunk_size=rng.choice([3, 8, 64]),
        overlap_steps=rng.choice([0, 1, 2]),
        mixed=rng.random() < 0.7,
        prefix_cache=rng.random() < 0.7 or with_roles is not None,
        quantization="int8" if other else "auto",
        **drafting,
        **(switches | shared),
    )


def make_dispatcher_world(seed: int) -> tuple[World, Dispatcher]:
    """Up to four toys, a policy, sockets of memory, and dice."""
    rng = random.Random(seed)
    shared: dict[str, Any] = {
        "seed": seed,
        "policy": rng.choice(["fcfs", "priority", "lpm"]),
        "max_queued_requests": rng.choice([3, *[1000] * 5]),
        "max_queued_tokens": rng.choice([300, *[100_000] * 5]),
    }
    count = rng.choice([1, 2, 3, 3, 4])
    others = rng.random() < 0.3
    roles, with_roles = random_roles(random.Random(seed + 13), count)
    engines = [
        toy_engine(seed * 10 + n, shared, other=others and n % 2 == 1, with_roles=with_roles)
        for n in range(count)
    ]
    policies = list(POLICIES)
    options: dict[str, Any] = {
        "policy": policies[seed % len(policies)],
        "on_loss": rng.choice([*["continue"] * 6, "identical", "identical", "fail"]),
    }
    options |= roles
    dispatcher: Dispatcher
    if framed := rng.random() < 0.7:
        dispatcher = FramedDispatcher(engines, dice=random.Random(seed + 9), **options)
        for replica in dispatcher._replicas if seed % 5 == 2 else ():
            replica.same_host = True  # pages are files, and not messages
    else:
        dispatcher = Dispatcher(engines, **options)
    single: Any = dispatcher
    nothing: Any = None
    world = World(rng, single, _NoDevice(), nothing, longer_params, verify, random_prefills)
    world.counts["worlds with frames"] += framed
    world.counts["worlds with roles"] += bool(roles)
    return world, dispatcher


def random_roles(rng: random.Random, count: int) -> tuple[dict[str, Any], int | None]:
    """Options of a dispatcher, and the size of pages that its replicas have in common; 0: none."""
    if count < 2 or rng.random() < 0.4:
        return {}, None
    roles = ["prefill", "decode", *rng.choices(["prefill", "decode", "both"], k=count - 2)]
    rng.shuffle(roles)
    size = rng.choice([0, 1, 1, 2, 2, 4, 4])
    gib = rng.choice([1e-7, 1e-5, *[1.0] * 4])  # some hardly hold a page
    return {"roles": roles, "prefill_tokens": rng.choice([1, 1, 8, 24]), "exchange_gib": gib}, size


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
    dice = random.Random((dispatcher.config.seed or 0) + 7)
    counts = world.counts
    kinds, weights = (["kill", "hang", "restart", "roll", "pause", "flush", "look"],
                      [4, 1, 12, 2, 2, 1, 2])  # fmt: skip
    while asyncio.get_running_loop().time() < _DISTURBED:
        await asyncio.sleep(dice.expovariate(1 / 0.03))
        what = dice.choices(kinds, weights)[0]
        ready = [each for each in dispatcher._replicas if each.state is ReplicaState.READY]
        lost = [each for each in dispatcher._replicas if each.state is ReplicaState.LOST]
        if what in ("kill", "hang") and len(ready) == 1 and dice.random() < 0.9:
            continue  # else most worlds would have no replica for most of the time
        if what == "kill" and ready:
            for replica in dice.sample(ready, min(len(ready), dice.choice([1, 1, 1, 1, 1, 2]))):
                kill(replica)
                counts["replicas lost"] += 1
        elif what == "hang" and ready and isinstance(hanging := dice.choice(ready), FramedReplica):
            counts["replicas that hang"] += 1
            hanging.hang(dice.choice([0.8, 3.0, 40.0]))
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
                    kill(dice.choice(left))
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


async def move_sessions(world: World, dispatcher: Dispatcher) -> None:
    """Sessions move between replicas, also such as are lost meanwhile, and their turns are those of one
    engine."""
    dice = random.Random((dispatcher.config.seed or 0) + 11)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    while asyncio.get_running_loop().time() < _DISTURBED:
        await asyncio.sleep(dice.expovariate(1 / 0.2))
        with contextlib.suppress(Rejected, EngineFailed, EngineClosed, InvalidRequest):
            async with dispatcher.session(ttl=dice.choice([0.05, 10.0])) as session:
                ids: list[int] = []
                for _ in range(4):
                    more = dice.choices(range(VOCAB), k=dice.randint(1, 8))
                    result = await session.generate(more, params)
                    assert result.token_ids == toy_generate([*ids, *more], params)
                    ids += [*more, *result.token_ids]
                    target = dice.choice(dispatcher._replicas)
                    held = await session.move(target.name)
                    assert held <= len(ids)
                    world.counts["sessions moved"] += held > 0


def kill(replica: Replica) -> None:
    """Its device is gone."""
    if isinstance(replica, FramedReplica):
        replica.die()
        return
    assert isinstance(replica, LocalReplica)
    lose_engine(replica.engine)


def may_fail(dispatcher: Dispatcher, record: Record) -> bool:
    """Consumers see no loss while a replica is left that could go on."""
    running = dispatcher._started()
    if dispatcher._on_loss == "fail" or len(record.losses) >= 2 or not running.placing.alive:
        return True
    return dispatcher._on_loss == "identical" and not running.placing.computes(
        record, Wanted(record.output.numerics, record.output.newest_version), soon=True
    )


def check_sums(dispatcher: Dispatcher) -> None:
    """Gauges are those of the replicas that serve; counters have what others had counted, and never fall."""
    stats = dispatcher.stats()
    serving = [found for found in stats.replicas if found.state in ("ready", "silent", "draining")]
    each = [found.stats for found in serving if found.stats is not None]
    for name in COUNTERS:
        last = LAST.setdefault(dispatcher, {}).get(name, 0)
        now = getattr(stats, name)
        assert now >= max(last, sum(getattr(found, name) for found in each)), name
        LAST[dispatcher][name] = now
    for name in ("running", "pages_total", "pages_free"):
        assert getattr(stats, name) == sum(getattr(found, name) for found in each), name
    assert stats.waiting >= sum(found.waiting for found in each)
    assert stats.ready_replicas == sum(found.state == "ready" for found in stats.replicas)
