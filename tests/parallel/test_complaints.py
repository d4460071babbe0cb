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
from tests.parallel.toys import (
    ENDLESS,
    PARAMS,
    STEP,
    Toy,
    attempt_of,
    end,
    placed,
    prompt,
    sent,
    toys,
    turn,
    virtual,
)
from tests.tiers import SECONDS, points, rest

EVEN = ("round_robin", "total_requests", "total_tokens", "prefix")


@pytest.mark.parametrize("policy", EVEN)
@virtual
async def test_a_burst_of_equal_requests_is_spread_evenly(policy: str) -> None:
    """Seen: requests pile up on a few ranks while others are idle; counts came late, or over fresher ones."""
    async with Dispatcher(toys(3), policy=policy) as dispatcher:
        streams = [dispatcher.generate(prompt(number, 20), ENDLESS) for number in range(21)]
        found = await placed(dispatcher, streams)
        assert len(found) == 3
        assert all(6 <= count <= 8 for count in found.values()), found
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
        assert not any(
            each.load.requests or each.load.tokens or each.load.backlog for each in dispatcher._replicas
        )


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
            replica = attempt_of(home).replica
            await home
            streams: list[Stream] = []
            for number in range(64):
                streams.append(dispatcher.generate([*common, number], ENDLESS))
                await asyncio.sleep(2 * STEP)
                if attempt_of(streams[-1]).replica is not replica:
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
