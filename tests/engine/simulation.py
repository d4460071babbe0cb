"""Random lifetimes of requests on the toy device in virtual time, with every law checked on the way."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.execution.device import DeviceLost, StepOutOfMemory
from aioinfer.params import SamplingParams
from aioinfer.request import Request
from aioinfer.scheduling.audit import audit, check, check_idle
from aioinfer.scheduling.policy import POLICIES
from aioinfer.scheduling.step import Row, Step
from aioinfer.stream import Stream
from aioinfer.twin import TimedLauncher, ToyDevice, ToyTokenizer, VirtualLoop, toy_generate
from aioinfer.twin.toy import toy_logprob

VOCAB = 64


class LawChecker:
    """Sits on a scheduler and asserts conservation, fencing, seniority and single endings at every step."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.resolved = 0
        self.launched = 0
        #: newest step that read or wrote a page or a slot, and that wrote a page
        self.page_touched: dict[int, int] = {}
        self.page_written: dict[int, int] = {}
        self.slot_touched: dict[int, int] = {}
        #: whose the newest touch was: key and how often it had been retracted
        self.page_tenant: dict[int, tuple[int, int]] = {}
        self.slot_tenant: dict[int, tuple[int, int]] = {}
        self.ended: set[int] = set()
        self._methods = {
            name: getattr(type(scheduler), name) for name in ("plan", "resolve", "fail", "finish", "_retract")
        }
        #: a step ran out of memory: then, and only then, the eldest is retracted
        self.running_out = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def plan(self) -> Step | None:
        step: Step | None = self.scheduler.plan()
        self.check()
        if step is None:
            return None
        assert step.id == self.launched + 1
        self.launched = step.id
        rows = step.rows
        assert sum(row.length for row in rows) == step.num_tokens <= self.scheduler.limits.max_step_tokens
        assert step.num_tokens <= self.scheduler.cap.tokens
        assert len({row.slot for row in rows}) == len(rows) == step.num_rows, (
            "a slot has two rows in one step"
        )
        self.check_limits(step)
        for row in rows:
            self.check_row(step, row)
        return step

    def check_limits(self, step: Step) -> None:
        limits = self.scheduler.limits
        chunks = [row.length for row in step.prefills]
        assert max(chunks, default=0) <= limits.chunk_size
        most = limits.max_prefill_tokens
        if most is not None and sum(chunks) > most:
            assert chunks[0] > most, "only the first chunk may be longer than the budget"
            assert sum(chunks[1:]) <= (most if limits.admission == "pack" else 0)
        assert step.num_decodes <= (limits.max_decode_rows or step.num_decodes)
        assert limits.mixed or not (step.num_decodes and chunks), "a mixed step, and mixing is off"

    def check_row(self, step: Step, row: Row) -> None:
        request, size = row.request, self.scheduler.memory.pages.page_size
        assert not request.finished, "a row of a request that has ended"
        assert not request.parked, "a row of a parked request"
        assert row.kv_length <= request.max_length
        first, stop = row.start // size, -(-row.kv_length // size)
        assert stop <= len(request.pages), "a position without a page"
        assert first >= request.cached_pages, "a row writes into the prefix cache"
        for page in request.pages[: request.cached_pages]:
            assert self.page_written.get(page, 0) <= self.resolved, f"cached page {page} is not resolved"
        tenant = (request.key, request.retractions)
        for page in request.pages[-(-row.start // size) : stop]:
            landed = self.page_touched.get(page, 0) <= self.resolved
            assert landed or self.page_tenant[page] == tenant, f"page {page} reused in flight"
        if row.admission is not None:
            landed = self.slot_touched.get(row.slot, 0) <= self.resolved
            assert landed or self.slot_tenant[row.slot] == tenant, f"slot {row.slot} reused in flight"
        self.slot_touched[row.slot] = step.id
        self.slot_tenant[row.slot] = tenant
        self.page_tenant.update(dict.fromkeys(request.pages[:stop], tenant))
        self.page_touched.update(dict.fromkeys(request.pages[:stop], step.id))
        self.page_written.update(dict.fromkeys(request.pages[first:stop], step.id))

    def resolve(self, step: Step, tokens: Sequence[int], forced: Any = ()) -> list[Request]:
        self._land(step)
        advanced: list[Request] = self.scheduler.resolve(step, tokens, dict(forced))
        self.check()
        return advanced

    def fail(self, step: Step, error: BaseException) -> list[Request]:
        self._land(step)
        failed: list[Request] = self.scheduler.fail(step, error)
        self.check()
        return failed

    def run_out(self, step: Step, error: BaseException) -> list[Request]:
        self._land(step)
        known = {request.key: request.known for request in step.requests}
        self.running_out = True
        failed: list[Request] = self.scheduler.run_out(step, error)
        self.running_out = False
        assert self.scheduler.cap.tokens <= max(1, step.num_tokens // 2), "the next step asks for as much"
        for request in step.requests:
            assert request.known == known[request.key], (
                "a token that was read is lost, or one that was not came"
            )
        self.check()
        return failed

    def _land(self, step: Step) -> None:
        assert step.id == self.resolved + 1, "steps resolve in order, each once"
        self.resolved = step.id

    def check(self) -> None:
        check(self.scheduler)
        if self.launched % 8 == 0:
            audit(self.scheduler)
        memory = self.scheduler.memory
        if memory.pages.fenced or memory.slots.fenced:
            assert self.resolved < self.launched, "something is fenced, and no step is in flight"

    def totals(self) -> Counter[str]:
        """What happened, to see that everything did."""
        counters, memory, admitter = self.scheduler.counters, self.scheduler.memory, self.scheduler.admitter
        return Counter(
            retractions=counters.retractions,
            preemptions=counters.preemptions,
            parkings=counters.parkings,
            out_of_memory_retries=counters.out_of_memory_retries,
            late_tokens=counters.late_tokens,
            deferred_rows=counters.deferred_rows,
            forced_tokens=counters.forced_tokens,
            hit_tokens=memory.hit_tokens,
            held_back=admitter.held,
            packed_rounds=admitter.packed_rounds,
            forced_rounds=admitter.forced_rounds,
        )


def watch(engine: Engine) -> LawChecker:
    """Put a checker between the engine's core and its scheduler."""
    core = engine._core
    assert core is not None
    checker = LawChecker(core.scheduler)
    senior = core.scheduler

    class Watched(type(senior)):  # type: ignore[misc]
        __slots__ = ()

        def _retract(self, request: Request) -> None:
            active = [each.key for each in self.running.values() if not each.parked]
            spared = request.parked or checker.running_out or request.key != min(active)
            assert spared, "the eldest request was retracted"
            super()._retract(request)

        def finish(self, request: Request, reason: Any, error: BaseException | None = None) -> bool:
            first = bool(super().finish(request, reason, error))
            assert not (first and request.key in checker.ended), "a request ended twice"
            checker.ended.add(request.key)
            return first

    senior.__class__ = Watched
    core.scheduler = checker  # type: ignore[assignment]
    return checker


@dataclass
class World:
    """One engine under test, the dice, and what came of its requests."""

    rng: random.Random
    engine: Engine
    device: ToyDevice
    launcher: TimedLauncher
    faults: set[int] = field(default_factory=set)
    outcomes: list[tuple[Any, ...]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


#: policy, admission, mixed, prefix cache
COMBINATIONS = list(itertools.product(POLICIES, ("fifo", "pack"), (True, False), (True, False)))


class Injected(RuntimeError):
    """What an injected fault raises."""


def make_world(seed: int, fault_rate: float = 0.02, lose_at: int | None = None) -> World:
    rng = random.Random(seed)
    # Neighbouring seeds go through every combination of the switches.
    policy, admission, mixed, prefix_cache = COMBINATIONS[seed % len(COMBINATIONS)]
    page_size = rng.choice([1, 2, 4, 8])
    max_running = rng.randint(1, 8)
    num_pages = rng.randint(8, 40) if page_size > 1 else rng.randint(24, 60)
    window = rng.choice([0, 1, 2])
    config = EngineConfig(
        model="toy",
        page_size=page_size,
        max_running_requests=max_running,
        max_step_tokens=max_running + rng.choice([0, 3, 30]),
        chunk_size=rng.choice([1, 3, 8, 64]),
        window=window,
        seed=seed,
        max_queued_requests=rng.choice([10, 1000, 1000, 1000]),
        max_queued_tokens=rng.choice([300, 100_000, 100_000, 100_000]),
        max_prefill_tokens=rng.choice([None, None, 4, 16]),
        max_decode_rows=rng.choice([None, None, 1, 3]),
        mixed=mixed,
        first=rng.choice(["decode", "prefill"]),
        max_overlapped_prefill=rng.choice([0, 4, 1000]),
        policy=policy,
        preemption=rng.random() < 0.5,
        admission=admission,  # type: ignore[arg-type]
        lookahead=rng.choice([1, 4, 64]),
        force_fifo_every=rng.choice([0, 2, 8]),
        max_passed_over=rng.choice([1, 4, 16]),
        prefix_cache=prefix_cache,
        share_prefix_tokens=rng.choice([0, 4, 8]),
        new_token_ratio=rng.choice([0.0, 0.4, 1.0]),
        min_new_token_ratio=rng.choice([0.0, 0.1]),
        max_lag=rng.choice([None, None, 1, 5]),
    )
    dice = random.Random(seed + 1)

    # Memory that is short now and then, before or after the forward, or for steps of some size.
    shortage = random.Random(seed + 2)
    rate = shortage.choice([0.0, 0.0, 0.02, 0.2]) if fault_rate else 0.0
    most_tokens = shortage.choice([1000] * 8 + [1, 6]) if fault_rate else 1000

    def fault(step: Step) -> None:
        if lose_at is not None and step.id >= lose_at:
            device.lost = True
            raise Injected("the device is lost")
        if dice.random() < fault_rate:
            raise Injected(f"step {step.id}")
        if step.num_tokens > most_tokens or shortage.random() < rate / 2:
            raise StepOutOfMemory(f"step {step.id}")

    def late_fault(step: Step) -> None:
        if shortage.random() < rate / 2:
            raise StepOutOfMemory(f"step {step.id}, late")

    deferral_rate = rng.choice([0.0, 0.0, 0.1, 0.4])

    def defer(row: Row) -> int | None:
        if dice.random() >= deferral_rate:
            return None
        # What nobody samples has no logprob.
        return 0 if row.request.params.logprobs is not None else dice.choice([0, 1, 2, 9])

    device = ToyDevice(
        num_pages=num_pages,
        page_size=page_size,
        num_slots=config.num_slots,
        vocab_size=VOCAB,
        fault=fault,
        late_fault=late_fault,
        defer=defer,
    )
    launcher = TimedLauncher(device, lambda step: dice.choice([0.0, 0.001, 0.01]) + 1e-4 * step.num_tokens)
    engine = Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: ToyTokenizer(VOCAB))
    return World(rng, engine, device, launcher)


def random_params(rng: random.Random) -> SamplingParams:
    stop = rng.choice([(), (), ("a",), ("ab", "zz"), ("üb", "cd", "x")])
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1 << 40),
        max_tokens=rng.choice([1, 2, 5, 20, 40]),
        min_tokens=rng.choice([0, 0, 0, 1]),
        stop=stop,
        stop_token_ids=rng.choice([(), (), (3, 4, 5)]),
        ignore_eos=rng.random() < 0.3,
        include_stop=rng.random() < 0.2,
        logprobs=rng.choice([None, None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )


def expected(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Ids, text and finish reason that any correct engine must produce."""
    assert params.seed is not None
    limit = engine.info.max_model_len
    ids = toy_generate(prompt_ids, params, seed=params.seed, vocab_size=VOCAB, max_length=limit)
    pieces = ToyTokenizer(VOCAB)._pieces
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
    text = ""
    for index, token in enumerate(ids):
        ended = token in stop_ids
        if not ended or params.include_stop:
            before = len(text)
            text += pieces[token]
            hits = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in params.stop]
            hits = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
            if hits:
                end, at, _ = min(hits)
                return ids[: index + 1], text[: end if params.include_stop else at], "stop"
        if ended:
            return ids[: index + 1], text, "stop"
    return ids, text, "length"


async def lifetime(world: World, number: int) -> None:
    """One request from arrival to whatever end the dice chose."""
    rng, engine = world.rng, world.engine
    await asyncio.sleep(rng.expovariate(1 / 0.02))
    params = random_params(rng)
    length = rng.choice([1, 2, 7, 20, 20, 30, engine.info.max_model_len - 1])
    length = max(1, min(length, engine.info.max_model_len - 1))
    # Most prompts begin like others, so that prefixes are met, split and waited for.
    common = random.Random(rng.randrange(3)).choices(range(VOCAB), k=rng.choice([0, 8, 17, 17, 100]))
    ids = [*common, *rng.choices(range(VOCAB), k=length)][:length]
    as_text = rng.random() < 0.3
    text = "".join(chr(97 + token % 26) for token in ids)
    if as_text:
        ids = ToyTokenizer(VOCAB).encode(text)
    timeouts = {
        "waiting_timeout": rng.choice([None, None, 0.005, 0.5]),
        "running_timeout": rng.choice([None, None, 0.01, 0.5]),
    }
    scheduling: dict[str, Any] = {
        "priority": rng.randrange(3),
        "cache_salt": rng.choice(["", "", "", "tenant"]),
        "routing_key": rng.choice([None, "a", "b"]),
        "max_lag": rng.choice([None, None, None, 1, 3]),
    }
    behaviour = rng.choice(
        ["read", "read", "await", "cancel", "cancel", "close", "break", "drop", "slow", "timeout", "never"]
    )
    try:
        stream = engine.generate(text if as_text else ids, params, **timeouts, **scheduling)
    except (errors.Rejected, errors.EngineFailed) as error:
        assert isinstance(error, errors.Rejected) or world.device.lost
        world.counts["rejected"] += 1
        world.outcomes.append((number, "rejected"))
        return
    try:
        outcome = await _consume(world, stream, behaviour)
    except errors.TimedOut as error:
        assert timeouts[f"{error.phase}_timeout"] is not None
        outcome = ("timed out", error.phase)
    except errors.Rejected:
        outcome = ("rejected later",)
    except errors.StepFailed as error:
        assert isinstance(error.__cause__, Injected)
        outcome = ("step failed",)
    except errors.OutOfMemory as error:
        assert isinstance(error.__cause__, StepOutOfMemory)
        outcome = ("out of memory",)
    except errors.EngineFailed as error:
        assert isinstance(error.__cause__, DeviceLost)
        outcome = ("engine failed",)
    world.counts[str(outcome[0])] += 1
    world.outcomes.append((number, behaviour, *outcome))
    if outcome[0] == "finished":
        assert outcome[1:] == expected(engine, ids, params), (number, behaviour, ids, params)
    elif outcome[0] == "left":
        # What was delivered before the consumer left is a prefix of what would have come.
        full_ids, full_text, _ = expected(engine, ids, params)
        assert full_ids[: len(outcome[1])] == outcome[1]
        assert full_text.startswith(outcome[2])


async def _consume(world: World, stream: Stream, behaviour: str) -> tuple[Any, ...]:
    rng = world.rng
    if behaviour == "await":
        result = await stream
        metrics = result.metrics
        assert metrics is not None
        assert len(metrics.token_times) == len(result.token_ids) == result.usage.completion_tokens
        assert list(metrics.token_times) == sorted(metrics.token_times)
        start = len(result.prompt_token_ids)
        for at, logprob in enumerate(result.logprobs or ()):
            assert logprob == toy_logprob(start + at, result.token_ids[at])
        assert result.logprobs is None or len(result.logprobs) == len(result.token_ids)
        for at, logprob in enumerate((result.prompt_logprobs or ())[1:], 1):
            assert logprob == toy_logprob(at, result.prompt_token_ids[at])
        assert result.prompt_logprobs is None or len(result.prompt_logprobs) == start
        return "finished", result.token_ids, result.text, result.finish_reason
    if behaviour == "drop":
        del stream
        gc.collect(0)
        return ("dropped",)
    if behaviour == "never":
        await asyncio.sleep(rng.uniform(0, 0.2))
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
        return ("never read",)
    started = asyncio.Event()
    reader = asyncio.ensure_future(_read(world, stream, behaviour, started))
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


async def _read(world: World, stream: Stream, behaviour: str, started: asyncio.Event) -> tuple[Any, ...]:
    rng = world.rng
    ids: list[int] = []
    texts: list[str] = []
    reason: str | None = None
    limit = rng.randint(1, 4)
    chunks = 0
    started.set()
    try:
        async with asyncio.timeout(rng.uniform(0, 0.05) if behaviour == "timeout" else None):
            async for chunk in stream:
                assert reason is None, "a chunk came after the last one"
                assert chunk.text or chunk.token_ids or chunk.finish_reason
                ids += chunk.token_ids
                texts.append(chunk.text)
                reason = chunk.finish_reason
                chunks += 1
                if behaviour == "slow":
                    await asyncio.sleep(rng.uniform(0, 0.05))
                if behaviour in ("close", "break") and chunks == limit:
                    if behaviour == "close":
                        await stream.aclose()
                    break
    except TimeoutError as error:
        if isinstance(error, errors.TimedOut):
            raise
        return ("left", ids, "".join(texts))
    if reason is None:
        return ("left", ids, "".join(texts))
    return "finished", ids, "".join(texts), reason


async def operate(world: World) -> None:
    """Somebody pauses the engine, flushes its cache and looks at its figures now and then."""
    dice = random.Random(world.engine.config.seed)
    while True:
        await asyncio.sleep(dice.expovariate(1 / 0.02))
        try:
            match dice.choices(["pause", "flush", "look", "retract"], [3, 1, 3, 3])[0]:
                case "pause":
                    await world.engine.pause()
                    assert not world.engine.stats().steps_in_flight
                    await asyncio.sleep(dice.choice([0, 0.01]))
                    world.engine.resume()
                case "flush":
                    world.engine.flush_cache()
                    assert not world.engine.stats().pages_evictable
                case "retract":
                    scheduler = world.engine._core.scheduler  # type: ignore[union-attr]
                    if (victim := scheduler._victim()) is not None:
                        scheduler._retract(victim)
                        world.engine._driver.wake()  # type: ignore[union-attr]
                case "look":
                    stats = world.engine.stats()
                    held = stats.pages_free + stats.pages_fenced + stats.pages_private + stats.pages_cached
                    assert held == stats.pages_total
                    assert stats.prefilling + stats.decoding <= stats.running
        except errors.EngineFailed:
            return


async def run_world(world: World, lifetimes: int) -> LawChecker:
    await world.engine.start()
    checker = watch(world.engine)
    assert world.engine.ready
    operator = asyncio.ensure_future(operate(world))
    async with asyncio.TaskGroup() as group:
        for number in range(lifetimes):
            group.create_task(lifetime(world, number))
    operator.cancel()
    await asyncio.wait([operator])
    gc.collect()
    if world.device.lost:
        assert world.engine.state is EngineState.FAILED
        assert not world.engine._core.scheduler.has_unfinished  # type: ignore[union-attr]
    else:
        await settle(world.engine)
    await world.engine.aclose()
    return checker


async def settle(engine: Engine) -> None:
    """Everything is given back within two resolved steps of the last stream's end."""
    assert engine._core is not None
    scheduler = engine._core.scheduler
    await asyncio.sleep(0)
    in_flight = engine.stats().steps_in_flight
    assert in_flight <= engine.config.window + 1
    while engine.stats().steps_in_flight:
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


def simulate(
    seed: int, lifetimes: int, *, fault_rate: float = 0.02, lose_at: int | None = None
) -> tuple[World, LawChecker]:
    """Run one world to its end. Every failure names the seed."""
    world = make_world(seed, fault_rate, lose_at)
    loop = VirtualLoop(seed, shuffle=seed % 2 == 1, executor_delay=0.003)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            checker = runner.run(run_world(world, lifetimes))
    except BaseException as error:
        error.add_note(f"seed={seed} lifetimes={lifetimes} fault_rate={fault_rate} {world.engine.config}")
        raise
    return world, checker


def main() -> None:
    """``python -m tests.engine.simulation --lifetimes 100000``: as many as one likes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--lifetimes", type=int, default=100_000)
    parser.add_argument("--per-world", type=int, default=80)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    worlds = -(-options.lifetimes // options.per_world)
    for seed in range(options.first_seed, options.first_seed + worlds):
        world, checker = simulate(seed, options.per_world)
        counts += world.counts
        totals += checker.totals()
    seconds = time.perf_counter() - started
    print(f"{counts.total()} lifetimes in {worlds} worlds, {seconds:.1f} s: every law held")
    print(dict(counts.most_common()))
    print(dict(totals.most_common()))


if __name__ == "__main__":
    main()
