"""Random lifetimes of requests in virtual time, with every law checked on the way."""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from aioinfer import Chunk, StreamCheckpoint, errors
from aioinfer.engine import Engine, EngineState
from aioinfer.loop.updating import UpdateMode
from aioinfer.scheduling.audit import audit, check_idle
from aioinfer.scheduling.rates import TransferRates
from aioinfer.testing import VirtualLoop
from tests.engine.block_worlds import make_block_world
from tests.engine.guided_blocks import make_constrained_world
from tests.engine.holding import hold_and_commit, through_a_session
from tests.engine.laws import LawChecker, watch
from tests.engine.processors import CALLER
from tests.engine.reading import Reading, outcome_of, weights_of
from tests.engine.worlds import (
    VOCAB,
    Claim,
    World,
    make_seeing_world,
    make_world,
    of_prompt,
    with_branches,
    with_processors,
    with_store,
)
from tests.speculation.drafters import name_of
from tests.toys import ToyTokenizer


class Eager(TransferRates):
    """Whatever can be read is read."""

    def reading_pays(self, start: int, tokens: int) -> bool:
        return True


#: virtual seconds in which all lifetimes have ended
_LONGEST = 1000.0
#: what readers do who wait for nothing
_IMPATIENT = ("cancel", "timeout", "never", "drop")


async def lifetime(world: World, number: int) -> None:
    """One request from arrival to whatever end the dice chose."""
    rng, engine = world.rng, world.engine
    await asyncio.sleep(rng.expovariate(1 / 0.02))
    CALLER.set(number)
    params, pooling = world.params(rng), None
    if world.prefills is not None:
        params, pooling = world.prefills(params)
    length = rng.choice([1, 2, 7, 20, 20, 30, engine.info.max_model_len - 1])
    length = max(1, min(length, engine.info.max_model_len - 1))
    # Most prompts begin like others, so that prefixes are met, split and waited for.
    common = random.Random(rng.randrange(3)).choices(range(VOCAB), k=rng.choice([0, 8, 17, 17, 100]))
    ids = [*common, *rng.choices(range(VOCAB), k=length)][:length]
    as_text = rng.random() < 0.3
    text = "".join(chr(97 + token % 26) for token in ids)
    if as_text:
        ids = ToyTokenizer(VOCAB).encode(text)
    seen = None if world.imaging is None else world.imaging.prompt(engine)
    if seen is not None:
        ids, as_text = [*seen.encode()], False
        length = len(ids)
    timeouts: dict[str, Any] = {
        "waiting_timeout": rng.choice([None, None, 0.005, 0.5]),
        "running_timeout": rng.choice([None, None, 0.01, 0.5]),
    }
    scheduling: dict[str, Any] = {
        "priority": rng.randrange(3),
        "cache_salt": rng.choice(["", "", "", "tenant"]),
        "routing_key": rng.choice([None, "a", "b"]),
        "max_lag": rng.choice([None, None, None, 1, 3]),
        # Of its own dice, so that the others fall as they did before there were deadlines.
        "deadline": random.Random(number).choice([None, None, 0.02, 0.2, 5.0]),
        "ttft_target": random.Random(f"first {number}").choice([None, None, 0.02, 1.0]),
        "itl_target": random.Random(f"gap {number}").choice([None, None, 0.001, 0.02]),
    }
    behaviour = rng.choice(
        [
            *("read", "read", "await", "cancel", "cancel", "close", "break", "drop", "slow", "timeout"),
            *("never", "restore"),
        ]
    )
    if params.template is not None:  # what does not fit is refused
        params = replace(params, template=params.template[: engine.info.max_model_len - length])
    adapter, key = (None, 0) if world.adapters is None else world.adapters.choose(engine)
    if params.max_tokens == 0 and behaviour == "restore":
        behaviour = "await"  # there is nothing to go on with
    tree = None
    if world.branching is not None and params.max_tokens and pooling is None:
        tree = world.branching.tree(world, number, ids, key)
        behaviour = "read"
    if world.steering is not None:
        params = world.steering.choose(params, patient=behaviour not in _IMPATIENT)
        if world.steering.dice.random() < 0.8:  # else few live to be steered
            timeouts.clear()
    options = {**timeouts, **scheduling, "request_id": name_of(params)}
    in_turns = not as_text and pooling is None and adapter is None and engine.info.block_size is None
    in_turns = in_turns and seen is None
    try:
        if in_turns and tree is None and rng.random() < 0.2:
            stream = await through_a_session(engine, rng, ids, params, options)
        else:
            wanted = params if pooling is None else of_prompt(params)
            given: Any = seen or (text if as_text else ids)
            stream = engine.generate(given, wanted, adapter=adapter, pooling=pooling, **options)
    except (errors.Rejected, errors.EngineFailed) as error:
        assert isinstance(error, errors.Rejected) or world.device.lost
        world.counts["rejected"] += 1
        world.outcomes.append((number, "rejected"))
        return
    if tree is not None:
        world.outcomes.append((number, "branches", *await tree.grow(stream, params, timeouts)))
        world.counts["branched"] += 1
        return
    reading = Reading(stream, params)
    try:
        outcome = await _consume(world, reading, behaviour)
    except Exception as error:
        outcome = outcome_of(world, reading, error, timeouts, restored=behaviour == "restore")
    world.counts[str(outcome[0])] += 1
    world.outcomes.append((number, behaviour, *outcome))
    if outcome[0] in ("finished", "left", "failed"):
        whole = behaviour == "await" or pooling is not None
        result = stream.result() if whole and outcome[0] == "finished" else None
        tokens, answer, reason, versions = outcome[1:5]
        claim = Claim(number, behaviour, ids, params, tokens, answer, reason, result, versions, key, pooling)
        claim.failed = outcome[5] if outcome[0] == "failed" else None
        world.claims.append(claim)


async def _consume(world: World, reading: Reading, behaviour: str) -> tuple[Any, ...]:
    rng, stream = world.rng, reading.stream
    if behaviour == "await":
        result = await stream
        metrics = result.metrics
        assert metrics is not None
        assert len(metrics.token_times) == len(result.token_ids) == result.usage.completion_tokens
        assert list(metrics.token_times) == sorted(metrics.token_times)
        assert result.logprobs is None or len(result.logprobs) == len(result.token_ids)
        reading.weights = weights_of(stream.cell.output)
        versions = reading.versions
        if versions:
            assert result.weight_version == versions[-1][1]
        if isinstance(world.engine, Engine):  # a dispatcher's streams may have moved
            assert result.identical is (len(versions) < 2 and not stream.cell.output.switches)
        return "finished", result.token_ids, result.text, result.finish_reason, versions
    if behaviour == "drop":
        del stream, reading
        gc.collect(0)
        return ("dropped",)
    if behaviour == "never":
        await asyncio.sleep(rng.uniform(0, 0.2))
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
        return ("never read",)
    started = asyncio.Event()
    reader = asyncio.ensure_future(_read(world, reading, behaviour, started))
    if behaviour == "cancel":
        await started.wait()
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.01, 0.1]))
        if reader.cancel():
            try:
                await reader
            except asyncio.CancelledError:
                assert [chunk async for chunk in stream] == [], "a token came after cancel returned"
                return ("cancelled",)
    return await reader


async def _read(world: World, reading: Reading, behaviour: str, started: asyncio.Event) -> tuple[Any, ...]:
    rng, ids = world.rng, reading.ids
    reason: str | None = None
    limit = rng.randint(1, 4)
    chunks = 0
    started.set()
    try:
        async with asyncio.timeout(rng.uniform(0, 0.05) if behaviour == "timeout" else None):
            async for chunk in _restored(world, reading, limit) if behaviour == "restore" else reading.stream:
                assert reason is None, "a chunk came after the last one"
                assert chunk.text or chunk.token_ids or chunk.finish_reason or chunk.draft
                ids += chunk.token_ids
                reading.weights += [chunk.weight_version] * len(chunk.token_ids)
                assert chunk.step_map is None or len(chunk.step_map) == len(chunk.token_ids)
                assert chunk.draft is None or chunk.draft.start == len(ids)
                reading.texts.append(chunk.text)
                reason = chunk.finish_reason
                chunks += 1
                if behaviour == "slow":
                    await asyncio.sleep(rng.uniform(0, 0.05))
                if behaviour in ("close", "break") and chunks == limit:
                    if behaviour == "close":
                        await reading.stream.aclose()
                    break
    except TimeoutError as error:
        if isinstance(error, errors.TimedOut):
            raise
        return reading.so_far("left")
    return reading.so_far("left" if reason is None else "finished", reason)


async def _restored(world: World, reading: Reading, limit: int) -> AsyncIterator[Chunk]:
    """The chunks of a stream that is cut now and then, and goes on from its checkpoint."""
    chunks = 0
    stream = reading.stream
    while True:
        cut = False
        async for chunk in stream:
            yield chunk
            chunks += 1
            cut = chunks % limit == 0 and not stream.done
            if cut:
                break
        if not cut:
            return
        checkpoint = stream.checkpoint()
        if not checkpoint.params.logits_processors:
            checkpoint = StreamCheckpoint.from_json(checkpoint.to_json())
        stream.close()
        world.restored += 1
        try:
            stream = reading.stream = world.engine.restore(checkpoint)
        except errors.InvalidRequest as error:
            assert error.field == "checkpoint"
            found = {(each.name, each.fingerprint) for each in world.engine.adapters()}
            assert (checkpoint.adapter, checkpoint.adapter_fingerprint) not in found, error
            return  # its adapter is gone


async def operate(world: World) -> None:
    """Somebody pauses the engine, flushes its cache and looks at its figures now and then."""
    dice = random.Random(world.engine.config.seed)
    while True:
        await asyncio.sleep(dice.expovariate(1 / 0.02))
        try:
            flushes = 1 if world.store is None else 12
            match dice.choices(["pause", "flush", "look", "retract", "park"], [3, flushes, 3, 3, 3])[0]:
                case "pause":
                    await world.engine.pause()
                    assert not world.engine.stats().steps_in_flight
                    await asyncio.sleep(dice.choice([0, 0.01]))
                    world.engine.resume()
                case "flush":
                    world.engine.flush_cache()
                    assert not world.engine.stats().pages_evictable
                case "retract":
                    retract_one(world.engine)
                case "park":
                    park_and_unpark(world.engine)
                case "look":
                    stats = world.engine.stats()
                    assert stats.snapshots_cached <= (world.engine.info.num_snapshots or 0)
                    held = stats.pages_free + stats.pages_fenced + stats.pages_private + stats.pages_cached
                    assert held == stats.pages_total
                    assert stats.prefilling + stats.decoding <= stats.running
        except errors.EngineFailed:
            return


async def renew(world: World) -> None:
    """Somebody replaces the weights now and then, and tries to do so with what are none. Those of a toy are
    their version."""
    engine, dice = world.engine, random.Random((world.engine.config.seed or 0) + 7)
    while world.renewal is not None:
        await asyncio.sleep(dice.expovariate(1 / world.renewal))
        mode: UpdateMode = dice.choices(["keep", "wait", "abort"], [8, 2, 1])[0]  # type: ignore[assignment]
        before, wrong, hurried = engine.weight_version, dice.random() < 0.1, dice.random() < 0.1
        try:
            async with asyncio.timeout(dice.uniform(0, 0.02) if hurried else None):
                given = {"weights": None if wrong else before + 1}
                version = await engine.update_weights(given, mode=mode)
            assert version == before + 1 == engine.weight_version
            assert not wrong
        except errors.ConfigError:
            assert wrong
            assert engine.weight_version == before
        except TimeoutError:
            assert hurried
        except (errors.EngineFailed, errors.EngineClosed):
            return


async def forget(world: World) -> None:
    """The prefix cache is flushed again and again."""
    dice = random.Random((world.engine.config.seed or 0) + 9)
    while world.forgetting is not None:
        await asyncio.sleep(dice.expovariate(1 / world.forgetting))
        try:
            world.engine.flush_cache()
        except (errors.EngineFailed, errors.EngineClosed):
            return


def park_and_unpark(engine: Engine) -> None:
    """As if the consumers of all requests lagged, and read on at once, whatever is in flight."""
    runtime = engine._started()
    queues = runtime.core.scheduler.queues
    for request in [*queues.running.values()]:
        if not request.parked and not request.finished:
            queues.park(request)
            queues.unpark(request)
    runtime.driver.wake()


def retract_one(engine: Engine) -> None:
    """As if others needed the pages."""
    runtime = engine._started()
    scheduler = runtime.core.scheduler
    if (victim := scheduler._victim()) is not None:
        scheduler.queues.retract(victim)
        runtime.driver.wake()


async def run_world(world: World, lifetimes: int) -> LawChecker:
    await world.engine.start()
    runtime = world.engine._started()
    if runtime.core.scheduler.memory.tree is None:
        world.store = None  # snapshots are not kept, and so no prefixes
    if world.store is not None:
        runtime.transfers.attach(world.store, behind=True)
        if world.forgetting is not None or world.device.page_size < 8:  # else reading is slower than the toy
            runtime.core.rates = Eager(runtime.core.scheduler.times)
    checker = watch(world.engine)
    assert world.engine.ready
    operators = [asyncio.ensure_future(each(world)) for each in (operate, renew, forget)]
    operators.append(asyncio.ensure_future(hold_and_commit(world.engine, world.engine.config.seed or 0)))
    if world.adapters is not None:
        operators.append(asyncio.ensure_future(world.adapters.operate(world.engine)))
    # Operators go on for ever, so a request that hangs is no deadlock of the loop.
    async with asyncio.timeout(_LONGEST), asyncio.TaskGroup() as group:
        for number in range(lifetimes):
            group.create_task(lifetime(world, number))
    for operator in operators:
        operator.cancel()
    await asyncio.wait(operators)
    for operator in operators:
        if not operator.cancelled():
            operator.result()
    gc.collect()
    world.verify(world, world.claims)
    if world.device.lost:
        assert world.engine.state is EngineState.FAILED
        assert not world.engine._core.scheduler.queues.has_unfinished
    else:
        if world.adapters is not None:
            await world.adapters.settle(world.engine, world.device)
        await settle(world.engine)
        assert world.steering is None or not world.steering.asking, "a coroutine goes on for nobody"
    await world.engine.aclose()
    loads = set() if world.adapters is None else world.adapters._open  # of which a lost device hears no more
    others = asyncio.all_tasks() - {asyncio.current_task()} - loads
    assert not others, f"tasks go on for nobody: {others}"
    return checker


async def settle(engine: Engine) -> None:
    """Everything is given back when the steps in flight have resolved, ``overlap_steps`` + 1 at most."""
    scheduler = engine._core.scheduler
    await asyncio.sleep(0)
    in_flight = engine.stats().steps_in_flight
    assert in_flight <= (1 if engine.config.overlap_steps is None else engine.config.overlap_steps) + 1
    while engine.stats().steps_in_flight or scheduler.memory.transfers:
        await asyncio.sleep(0.001)
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total, stats
    assert stats.pages_cached == stats.pages_evictable
    assert stats.running == stats.waiting == stats.arriving == stats.shelved == stats.failed_checks == 0
    assert scheduler.memory.slots.free == scheduler.memory.slots.total
    check_idle(scheduler)
    audit(scheduler)
    engine.flush_cache()
    assert engine.stats().pages_free == stats.pages_total


MakeWorld = Callable[[int, float, int | None], World]


def simulate(
    seed: int,
    lifetimes: int,
    *,
    fault_rate: float = 0.02,
    lose_at: int | None = None,
    make: MakeWorld = make_world,
) -> tuple[World, LawChecker]:
    """Run one world to its end. Every failure names the seed."""
    world = make(seed, fault_rate, lose_at)
    loop = VirtualLoop(seed, shuffle=seed % 2 == 1, executor_delay=0.003)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            checker = runner.run(run_world(world, lifetimes))
    except BaseException as error:
        error.add_note(f"seed={seed} lifetimes={lifetimes} fault_rate={fault_rate} {world.engine.config}")
        raise
    return world, checker


def main() -> None:
    """``python -m tests.engine.simulation --lifetimes 100000``: as many as one likes. With ``--diffusion``,
    of a diffusion model; with ``--constrained``, of one whose requests have grammars; with ``--stores``, of
    engines that find most of what they forget in a store; with ``--steered``, of requests with logits
    processors; with ``--branches``, of streams that are forked, rewound and injected into; with ``--images``,
    of prompts that have some."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--lifetimes", type=int, default=100_000)
    parser.add_argument("--per-world", type=int, default=80)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--diffusion", action="store_true")
    parser.add_argument("--constrained", action="store_true")
    parser.add_argument("--stores", action="store_true")
    parser.add_argument("--steered", action="store_true")
    parser.add_argument("--branches", action="store_true")
    parser.add_argument("--images", action="store_true")
    options = parser.parse_args()
    if (options.diffusion or options.constrained) and (options.steered or options.branches):
        parser.error("--diffusion has no oracle for processors and branches")
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    steered: Counter[str] = Counter()
    worlds = -(-options.lifetimes // options.per_world)
    make: MakeWorld = make_block_world if options.diffusion else make_world
    if options.constrained:
        make = make_constrained_world
    if options.images:
        make = make_seeing_world
    if options.stores:
        make = with_store(make)
    if options.steered:
        make = with_processors(make)
    if options.branches:
        make = with_branches(make)
    for seed in range(options.first_seed, options.first_seed + worlds):
        world, checker = simulate(seed, options.per_world, make=make)
        counts += world.counts
        totals += checker.totals()
        moved = world.engine._core.scheduler.memory.transfers
        pages.update(loaded=moved.arrived, missed=moved.failed, stored=moved.stored)
        for part in (world.steering, world.branching):
            steered.update({} if part is None else part.counts)
    seconds = time.perf_counter() - started
    print(f"{counts.total()} lifetimes in {worlds} worlds, {seconds:.1f} s: every law held")
    print(dict(counts.most_common()))
    print(dict(totals.most_common()))
    print("pages:", dict(pages))
    print("processors and branches:", dict(steered))


if __name__ == "__main__":
    main()
