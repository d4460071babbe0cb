"""What users of other routers have complained about, each as a test.

The complaints are threads of vLLM, SGLang, Dynamo, Ray and their routers; docstrings say what was seen there.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from aioinfer import SamplingParams
from aioinfer.parallel import Candidate, Dispatcher, RoutingPolicy
from aioinfer.parallel.policies import POLICIES
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Replica, ReplicaState
from aioinfer.stream import Stream
from tests.parallel.test_policies import Bare, choice
from tests.parallel.toys import ENDLESS, PARAMS, STEP, Toy, attempt_of, prompt, sent, toys, virtual
from tests.tiers import SECONDS, points, rest

EVEN = ("round_robin", "total_requests", "total_tokens", "prefix")


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def placed(dispatcher: Dispatcher, streams: Sequence[Stream]) -> Counter[str]:
    """Where the streams are, once all of them are somewhere."""
    while (found := sent(dispatcher, streams))[""]:
        await turn()
    return found


async def end(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()
    await asyncio.sleep(10 * STEP)


@pytest.mark.parametrize("policy", EVEN)
@pytest.mark.parametrize(("replicas", "each"), [(3, 7)])
@virtual
async def test_a_burst_of_equal_requests_is_spread_evenly(policy: str, replicas: int, each: int) -> None:
    """Seen: requests pile up on a few ranks while others are idle; counts came late, or over fresher ones."""
    async with Dispatcher(toys(replicas), policy=policy) as dispatcher:
        streams = [dispatcher.generate(prompt(number, 20), ENDLESS) for number in range(replicas * each)]
        found = await placed(dispatcher, streams)
        assert all(abs(count - each) <= 1 for count in found.values()), found
        assert len(found) == replicas
        await end(streams)


@pytest.mark.parametrize("policy", EVEN)
@virtual
async def test_ties_rotate(policy: str) -> None:
    """Seen: a fixed order of equal ranks, so that the first one got more each time all were idle."""
    async with Dispatcher(toys(4), policy=policy) as dispatcher:
        homes: Counter[str] = Counter()
        for number in range(12):
            stream = dispatcher.generate(prompt(number), PARAMS)
            await turn()
            homes += sent(dispatcher, [stream])
            await stream
        assert set(homes.values()) == {3}, homes


class Watched(RoutingPolicy):
    """Checks at every decision that the loads count all decisions before it."""

    def __init__(self) -> None:
        super().__init__()
        self.decided = 0

    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        assert sum(each.replica.load.requests for each in candidates) == self.decided
        assert sum(each.replica.load.tokens for each in candidates) == 24 * self.decided
        self.decided += 1
        return self.least(candidates, lambda candidate: candidate.replica.load.requests)


@virtual
async def test_a_request_counts_from_the_moment_of_the_decision() -> None:
    """Seen: load was counted from the first response on, so a burst went to worker 0 as a whole."""
    policy = Watched()
    async with Dispatcher(toys(4), policy=policy) as dispatcher:
        streams = [dispatcher.generate(prompt(number, 16), PARAMS) for number in range(28)]
        found = await placed(dispatcher, streams)
        assert policy.decided == 28
        assert set(found.values()) == {7}
        assert not any(stream.admitted for stream in streams), "nothing has been computed yet"
        await asyncio.gather(*streams)
        assert not any(each.load.requests or each.load.tokens or each.load.backlog
                       for each in dispatcher._replicas)  # fmt: skip


@virtual
async def test_a_miss_does_not_ask_how_large_caches_are() -> None:
    """Seen: cold requests went to the worker with the smallest tree, although it was the busiest."""
    engines = toys(2)
    async with Dispatcher(engines, policy="prefix") as dispatcher:
        # The first engine has a large cache and nothing to do, the second one an empty one and much to do.
        for number in range(20):
            await engines[0].generate(prompt(number, 500), PARAMS)
        busy = [dispatcher.generate(prompt(100, 400), ENDLESS)]
        busy += [dispatcher.generate([*prompt(100, 400), number], ENDLESS) for number in range(3)]
        await asyncio.sleep(5 * STEP)
        for replica in dispatcher._replicas:
            load = sum(attempt_of(each).replica is replica for each in busy)
            assert load == replica.load.requests
        least = min(dispatcher._replicas, key=lambda each: each.load.requests)
        cached = engines[0].stats().pages_cached
        assert cached > 20 * 100
        cold = [dispatcher.generate(prompt(number, 100), ENDLESS) for number in range(200, 220)]
        assert await placed(dispatcher, cold[:1])
        first = attempt_of(cold[0])
        assert first is not None
        assert first.replica is least
        assert max((await placed(dispatcher, cold)).values()) <= 11, "and later ones go to both"
        await end([*busy, *cold])


@virtual
async def test_affinity_fades_and_does_not_break_off() -> None:
    """Seen: one threshold of imbalance, beyond which all affinity was thrown away at once.

    Here each further request at the home of a prefix takes something off its attraction: what a longer one
    is worth, a larger imbalance costs."""
    moved: list[int] = []
    for length in (64, 256, 1024, 2000):
        async with Dispatcher(toys(2), policy="prefix") as dispatcher:
            common = prompt(1, length)
            home = dispatcher.generate(common, PARAMS)
            await turn()
            attempt = attempt_of(home)
            assert attempt is not None
            await home
            streams: list[Stream] = []
            for number in range(64):
                streams.append(dispatcher.generate([*common, number], ENDLESS))
                await asyncio.sleep(2 * STEP)
                there = attempt_of(streams[-1])
                assert there is not None
                if there.replica is not attempt.replica:
                    break
            moved.append(len(streams) - 1)
            await end(streams)
    assert moved == [1, 3, 6, 8], "requests that stay at home, by the length of what they share"


@rest(SECONDS)
@pytest.mark.parametrize(
    ("gap", "replicas", "length"), points([(1.5, 4, 256)], [(4.0, 4, 1024), (3.0, 8, 1024), (1.0, 8, 2048)])
)
@virtual
async def test_a_hot_shared_prefix_does_not_fill_one_replica(gap: float, replicas: int, length: int) -> None:
    """Seen: all traffic with one system prompt went to one of eight."""
    dice = random.Random(7)
    async with Dispatcher(toys(replicas), policy="prefix") as dispatcher:
        system = prompt(1, length)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        streams: list[Stream] = []
        loads: Counter[str] = Counter()
        for number in range(160):
            streams.append(dispatcher.generate([*system, *prompt(number, dice.randint(5, 60))], params))
            await asyncio.sleep(dice.expovariate(1 / (gap * STEP)))
            if number >= 60:
                loads.update({each.name: each.load.requests for each in dispatcher._replicas})
        assert max(loads.values()) <= 1.3 * sum(loads.values()) / replicas, loads
        await asyncio.gather(*streams)
        stats = dispatcher.stats()
        assert stats.cached_tokens > 0.85 * stats.queried_tokens * length / (length + 32)


@virtual
async def test_a_burst_with_a_hot_prefix_is_spread_evenly() -> None:
    async with Dispatcher(toys(4), policy="prefix") as dispatcher:
        await dispatcher.generate(prompt(1, 800), PARAMS)
        streams = [dispatcher.generate([*prompt(1, 800), number], ENDLESS) for number in range(60)]
        found = await placed(dispatcher, streams)
        assert max(found.values()) <= 1.3 * 60 / 4, found
        await end(streams)


def test_several_dispatchers_do_not_herd_with_p2c() -> None:
    """Seen: several routers with the same knowledge send everything to the same worker.

    Many dispatchers know their own requests only, and none has sent any: to all, all replicas look alike."""

    def first_choices(policy: str) -> Counter[str]:
        replicas = [Bare(str(number)) for number in range(4)]
        return Counter(choice(policy, *((each, 1) for each in replicas), seed=seed) for seed in range(256))

    spread = first_choices("p2c")
    assert len(spread) == 4
    assert max(spread.values()) <= 1.3 * 256 / 4, spread
    assert first_choices("total_tokens") == {"0": 256}, "which is why there is p2c"


@pytest.mark.parametrize("policy", ["total_tokens", "prefix", "p2c"])
@virtual
async def test_a_long_prompt_counts_by_its_tokens(policy: str) -> None:
    """Seen: one request of ten thousand tokens counted as much as one of a hundred."""
    async with Dispatcher(toys(2, longest=16_384, max_step_tokens=8192), policy=policy) as dispatcher:
        long = dispatcher.generate(prompt(0, 10_000), PARAMS)
        await placed(dispatcher, [long])
        short = [dispatcher.generate(prompt(number, 100), PARAMS) for number in range(1, 21)]
        await placed(dispatcher, short)
        attempt = attempt_of(long)
        assert attempt is not None
        assert attempt.replica.load.requests == 1, "all short ones go to the other one"
        await asyncio.gather(long, *short)


@pytest.mark.parametrize("policy", POLICIES)
@virtual
async def test_a_single_request_waits_for_no_timer(policy: str) -> None:
    """Seen: 48 ms more to the first token at a concurrency of one, from a timer that batched tokens."""
    loop = asyncio.get_running_loop()
    times: list[list[float]] = []
    alone = Toy()
    async with alone, Dispatcher(toys(3), policy=policy) as dispatcher:
        for engine in (alone, dispatcher):
            start, found = loop.time(), list[float]()
            async for _ in engine.generate(prompt(1, 40), PARAMS):
                found.append(loop.time() - start)
            times.append(found)
    assert times[0] == pytest.approx(times[1], abs=1e-12)
    assert times[1][0] == pytest.approx(STEP + 40e-5)


@virtual
async def test_replicas_share_nothing() -> None:
    """Seen: ranks went in lockstep, so dense models waited for the slowest one.

    A replica that hangs delays nobody on another one, to the tick."""
    loop = asyncio.get_running_loop()

    async def times(stream: Stream) -> list[float]:
        return [loop.time() async for _ in stream]

    found: list[list[list[float]]] = []
    for hangs in (False, True):
        engines = toys(3)
        async with Dispatcher(engines, policy="round_robin") as dispatcher:
            base = loop.time()
            streams = [dispatcher.generate(prompt(number), PARAMS) for number in range(9)]
            await placed(dispatcher, streams)
            engines[0].launcher.hung = hangs
            others = [each for each in streams if attempt_of(each).replica.name != "local-0"]
            read = await asyncio.gather(*map(times, others))
            found.append([[round(at - base, 9) for at in each] for each in read])
            assert len(others) == 6
            assert engines[1].ready
            assert dispatcher._replicas[0].state is ReplicaState.READY
            await end(streams)
    assert found[0] == found[1]
