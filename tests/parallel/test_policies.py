"""Policies: where requests go, and what becomes of a policy that raises."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer import ConfigError, SamplingParams, StepFailed
from aioinfer.parallel import Candidate, Dispatcher, RoutingPolicy
from aioinfer.parallel.policies import routing_policy
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Load, Replica
from tests.parallel.toys import PARAMS, Toy, attempt_of, expected, placed, prompt, sent, toys, turn, virtual
from tests.tiers import SECONDS, rest


def test_an_unknown_policy_is_refused_by_name() -> None:
    for wrong in ("fastest", "", None, 5, ["prefix"], RoutingPolicy):
        with pytest.raises(ConfigError, match="policy must be one of round_robin"):
            Dispatcher([Toy()], policy=wrong)  # type: ignore[arg-type]


@virtual
async def test_follow_up_turns_go_where_their_pages_are() -> None:
    async with Dispatcher(toys(4), policy="prefix") as dispatcher:
        talks = [prompt(number, 400) for number in range(8)]
        homes: list[set[str]] = [set() for _ in talks]
        for turn_number in range(4):
            streams = [dispatcher.generate(ids, PARAMS) for ids in talks]
            await turn()
            for home, stream in zip(homes, streams, strict=True):
                home.add(attempt_of(stream).replica.name)
                if turn_number:
                    assert attempt_of(stream).uncached <= 12, "all but the newest turn is cached"
            for number, stream in enumerate(streams):
                talks[number] += (await stream).token_ids + prompt(100 + number, 3)
        assert [len(home) for home in homes] == [1] * 8
        assert Counter(name for home in homes for name in home).most_common()[-1][1] == 2


class Noting(RoutingPolicy):
    """Takes the first, and notes what each would have to compute."""

    looks_at_prefixes = True

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[list[int]] = []

    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        self.offered.append([each.uncached for each in candidates])
        return candidates[0].replica


@virtual
async def test_a_prefix_that_is_being_computed_counts_as_there() -> None:
    policy = Noting()
    async with Dispatcher(toys(3), policy=policy) as dispatcher:
        common = prompt(1, 400)
        await asyncio.gather(*(dispatcher.generate([*common, number], PARAMS) for number in range(3)))
        assert policy.offered == [[401, 401, 401], [1, 401, 401], [1, 401, 401]]
        # What is computed no longer and cached is asked of the engine; what was flushed, nobody has.
        await dispatcher.generate([*common[:200], 1, 2, 3], PARAMS)
        dispatcher.flush_cache()
        await dispatcher.generate([*common[:200], 1, 2, 3], PARAMS)
        assert policy.offered[3:] == [[3, 203, 203], [203, 203, 203]]


@virtual
async def test_the_salts_of_other_tenants_do_not_attract() -> None:
    """Nor do they tell what others have asked: the cost of a request is that of one nobody knows."""
    async with Dispatcher(toys(4), policy="prefix") as dispatcher:
        ids = prompt(1, 400)
        for salt in ("", "one", "two", "three"):
            stream = dispatcher.generate(ids, PARAMS, cache_salt=salt)
            await turn()
            assert attempt_of(stream).uncached == 400, "cached or on its way, it is another tenant's"
            await stream
        again = dispatcher.generate(ids, PARAMS, cache_salt="two")
        await turn()
        assert attempt_of(again).uncached < 8
        await again


@rest(SECONDS)
@virtual
async def test_hash_keeps_keys_together_and_in_bounds() -> None:
    async with Dispatcher(toys(4), policy="hash") as dispatcher:
        homes: dict[str, set[str]] = {}
        for number in range(60):
            key = f"user-{number % 20}"
            stream = dispatcher.generate(prompt(number), PARAMS, routing_key=key)
            await turn()
            homes.setdefault(key, set()).add(attempt_of(stream).replica.name)
            await stream
        assert all(len(home) == 1 for home in homes.values()), "a key has one home while there is room"
        assert len(set.union(*homes.values())) == 4
        # One key that everybody uses fills its home to a quarter above the mean, and some.
        streams = [dispatcher.generate(prompt(number), PARAMS, routing_key="all") for number in range(100)]
        assert max((await placed(dispatcher, streams)).values()) <= 1.25 * 100 / 4 + 5
        await asyncio.gather(*streams)


@virtual
async def test_hash_without_a_key_goes_by_the_beginning_of_the_prompt() -> None:
    async with Dispatcher(toys(4), policy="hash") as dispatcher:
        homes = set()
        for number in range(6):
            stream = dispatcher.generate([*prompt(7, 64), *prompt(number, 5)], PARAMS)
            await turn()
            homes |= {*sent(dispatcher, [stream]).keys()}
            await stream
        assert len(homes) == 1


@virtual
async def test_a_key_moves_when_its_home_is_lost_and_others_stay() -> None:
    engines = toys(3)
    async with Dispatcher(engines, policy="hash") as dispatcher:
        keys = [f"key-{number}" for number in range(12)]

        async def homes() -> dict[str, str]:
            found = {}
            for key in keys:
                stream = dispatcher.generate([1, 2, 3], PARAMS, routing_key=key)
                await turn()
                (found[key],) = sent(dispatcher, [stream])
                await stream
            return found

        before = await homes()
        engines[1].lose()
        after = await homes()
    assert {key for key in keys if before[key] != after[key]} == {
        key for key in keys if before[key] == "local-1"
    }


class Moody(RoutingPolicy):
    """Raises for some, and chooses what it was not offered for others."""

    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        if record.output.label == "raises":
            raise ValueError("not this one")
        if record.output.label == "wrong":
            return "local-0"  # type: ignore[return-value]
        return candidates[0].replica


@virtual
async def test_a_policy_that_raises_ends_only_that_request() -> None:
    async with Dispatcher(toys(2), policy=Moody()) as dispatcher:
        labels = ["fine", "raises", "wrong", "fine too"]
        streams = [dispatcher.generate(prompt(3), PARAMS, request_id=label) for label in labels]
        results: list[Any] = await asyncio.gather(*streams, return_exceptions=True)
        for number in (0, 3):
            assert results[number].token_ids == expected(prompt(3))
        for number in (1, 2):
            assert isinstance(results[number], StepFailed)
            assert results[number].request_id == labels[number]
        assert "ValueError('not this one')" in str(results[1])
        assert isinstance(results[1].__cause__, ValueError)
        assert not any(replica.load.requests for replica in dispatcher._replicas)


# -- decisions, without engines ------------------------------------------------------------------------


class Bare:
    """As much of a replica as policies look at."""

    def __init__(self, name: str, *, requests: int = 0, backlog: int = 0, tokens: int = 0) -> None:
        self.name = name
        self.load = Load()
        self.load.attempts = dict.fromkeys(range(requests))  # type: ignore[assignment]
        self.load.backlog, self.load.tokens = backlog, tokens


def choice(policy: str, *candidates: tuple[Bare, int], seed: int = 0) -> str:
    offered = [Candidate(replica, uncached, uncached) for replica, uncached in candidates]  # type: ignore[arg-type]
    chosen: Any = routing_policy(policy, seed).choose(None, offered)  # type: ignore[arg-type]
    return str(chosen.name)


@virtual
async def test_what_lies_before_the_scored_tokens_counts_as_cached() -> None:
    replicas = toys(2)
    async with Dispatcher(replicas, policy="prefix") as dispatcher:
        await replicas[1].generate(prompt(1, 400), SamplingParams(max_tokens=0))
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=380)
        result = await dispatcher.generate(prompt(1, 400), scored)
        assert result.usage.cached_tokens >= 370
        assert replicas[0].stats().admitted == 0


def test_prefix_weighs_what_is_cached_against_what_waits() -> None:
    """The better half of a prompt that is cached is worth so many tokens of others' prompts, not more."""
    for backlog in range(0, 2000, 50):
        cached, empty = Bare("cached", backlog=backlog), Bare("empty")
        wanted = "cached" if backlog <= 1000 else "empty"
        if backlog != 1000:
            assert choice("prefix", (cached, 200), (empty, 1200)) == wanted, backlog


def test_total_requests_and_total_tokens_count_what_their_names_say() -> None:
    few_long, many_short = Bare("long", requests=2, tokens=9000), Bare("short", requests=5, tokens=500)
    assert choice("total_requests", (few_long, 1), (many_short, 1)) == "long"
    assert choice("total_tokens", (few_long, 1), (many_short, 1)) == "short"


def test_p2c_takes_the_better_of_two() -> None:
    replicas = [Bare(str(number), tokens=number) for number in range(8)]
    policy = routing_policy("p2c", 1)
    chosen: Counter[str] = Counter()
    for _ in range(4000):
        found: Any = policy.choose(None, [Candidate(each, 1, 1) for each in replicas])  # type: ignore[arg-type, misc]
        chosen[found.name] += 1
    assert chosen["7"] == 0, "the worst of all is never the better of two"
    # Of 28 pairs, 7 have the best one, 6 the second best ...
    for rank in range(7):
        assert abs(chosen[str(rank)] / 4000 - (7 - rank) / 28) < 0.03
