"""Each policy on a small example, and which requests each takes for equals."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import Any

import pytest

from aioinfer.cache.namespace import COMMON, Namespace
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.radix import token_key
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig, policy_names
from aioinfer.errors import ConfigError, StepFailed
from aioinfer.params import SamplingParams
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import SORT_LIMIT, Policy, Ranked, policy_class
from aioinfer.scheduling.sequence import Sequence
from aioinfer.testing import FakeEngine
from tests.sequences import new_sequence

PAGE = 2


class Queue:
    """A policy, and a cache whose contents the test chooses."""

    def __init__(self, policy: str | type, seed: int = 0) -> None:
        self.memory = Memory(PageAllocator(64, PAGE), SlotPool(8))
        self.policy: Policy = policy_class(policy)(self.memory, seed)

    def add(
        self, key: int, prompt: abc.Sequence[int] = (1,), max_tokens: int = 4, **options: object
    ) -> Sequence:
        request = new_sequence(
            key, prompt, SamplingParams(max_tokens=max_tokens), seed=0, stop_ids=frozenset(),
            max_length=len(prompt) + max_tokens, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.policy.add(request)
        return request

    def cache(self, ids: abc.Sequence[int], namespace: Hashable = COMMON) -> None:
        tree, pages = self.memory.tree, self.memory.pages
        assert tree is not None
        lock = tree.lock(b"", namespace)
        own = pages.take(len(ids) // PAGE)
        kept = tree.extend(lock, token_key(ids), own)
        fresh = [page for page, other in zip(own, kept, strict=True) if page == other]
        pages.keep(len(fresh))
        pages.give([page for page in own if page not in fresh], 0)
        tree.unlock(lock, 0)

    @property
    def keys(self) -> list[int]:
        return [request.key for request in self.policy.order()]


@pytest.mark.parametrize("name", policy_names())
def test_a_policy_has_the_name_that_a_config_calls_it(name: str) -> None:
    assert Queue(name).policy.name == name


def test_a_config_may_hold_a_policy_of_the_applications_own() -> None:
    class LongestPrompt(Ranked):
        def rank(self, request: Sequence) -> int:
            return -len(request.prompt_ids)

    queue = Queue(EngineConfig(policy=LongestPrompt).policy)
    assert queue.policy.name == "longest-prompt"
    for key in (1, 2, 3):
        queue.add(key, prompt=[1] * (key % 3 + 1))
    assert queue.keys == [2, 1, 3]


class Abstract(Policy, ABC):
    @abstractmethod
    def cost(self, request: Sequence) -> int: ...


class Concrete(Abstract):
    def cost(self, request: Sequence) -> int:
        return 1


class Fails(Policy):
    def __init__(self, memory: Memory, seed: int = 0) -> None:
        raise OSError("no table")


class TakesNothing(Policy):
    def __init__(self) -> None: ...


def fake(policy: type, **answers: Any) -> FakeEngine:
    return FakeEngine(**answers, config=EngineConfig(model="fake", num_pages=64, policy=policy))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (dict, r"policy must be a subclass of aioinfer\.scheduling"),
        (Sequence, r"policy must be a subclass of aioinfer\.scheduling"),
        (Abstract, "the policy Abstract is abstract: it lacks cost"),
        (Fails, "the policy Fails could not be made: .*no table"),
        (TakesNothing, "the policy TakesNothing could not be made: .*positional argument"),
    ],
)
async def test_a_class_that_makes_no_policy_is_refused_when_the_engine_starts(
    policy: type, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await fake(policy).start()
    async with fake(Concrete, answers="x") as engine:
        assert (await engine.generate("a")).text == "x"


async def test_what_a_policy_raises_for_an_arrival_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Unranked(Ranked):
        def rank(self, request: Sequence) -> int:
            raise KeyError("tenant")

    async with fake(Unranked, answers="x") as engine:
        with caplog.at_level(logging.ERROR, "aioinfer"), pytest.raises(StepFailed, match="tenant"):
            await engine.generate("a")
    (record,) = caplog.records
    assert record.exc_info
    assert "KeyError: 'tenant'" in caplog.text


class Silent(Policy):
    """Offers nothing while ``quiet``."""

    quiet = True

    def order(self) -> Iterator[Sequence]:
        return iter(()) if self.quiet else super().order()


async def test_a_policy_that_offers_nothing_ends_the_requests_that_wait() -> None:
    async with fake(Silent, answers="xyz") as engine:
        with pytest.raises(StepFailed) as caught:
            await engine.generate("a")
        assert "silent" in str(caught.value.__cause__)
        Silent.quiet = False
        try:
            assert len((await engine.generate("a")).text) == 3
        finally:
            Silent.quiet = True


@pytest.mark.parametrize("policy", ["no-such", Queue("fcfs").policy, 5])
def test_a_policy_is_a_known_name_or_a_class(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy must be one of"):
        EngineConfig(policy=policy)


def test_fcfs_keeps_the_order_of_arrival() -> None:
    queue = Queue("fcfs")
    requests = [queue.add(key) for key in (1, 2, 3)]
    queue.policy.remove(requests[0])
    queue.policy.add(requests[0])
    assert queue.keys == [1, 2, 3], "a retracted request keeps its age"


def test_lof_lets_the_longest_output_go_first() -> None:
    queue = Queue("lof")
    for key, max_tokens in ((1, 5), (2, 50), (3, 5), (4, 20)):
        queue.add(key, max_tokens=max_tokens)
    assert queue.keys == [2, 4, 1, 3]


def test_priority_lets_the_largest_go_first() -> None:
    queue = Queue("priority")
    for key, priority in ((1, 0), (2, 1), (3, -1), (4, 1)):
        queue.add(key, priority=priority)
    assert queue.keys == [2, 4, 1, 3]


def test_random_draws_the_same_order_for_the_same_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        queue = Queue("random", seed)
        for key in range(1, 20):
            queue.add(key)
        assert sorted(queue.keys) == list(range(1, 20))
        orders.append(queue.keys)
    assert orders[0] == orders[1] != orders[2]


def test_routing_key_prefers_what_runs_most() -> None:
    queue = Queue("routing-key")
    running = [queue.add(key, routing_key=name) for key, name in ((1, "a"), (2, "b"), (3, "b"))]
    for request in running:
        queue.policy.remove(request)
        queue.policy.started(request)
    for key, name in ((4, None), (5, "c"), (6, "a"), (7, "b"), (8, "b")):
        queue.add(key, routing_key=name)
    assert queue.keys == [7, 8, 6, 4, 5]
    queue.policy.stopped(running[1])
    queue.policy.stopped(running[2])
    assert queue.keys == [6, 4, 5, 7, 8]


def test_lpm_prefers_the_longest_cached_prefix() -> None:
    queue = Queue("lpm")
    queue.cache([1, 2, 3, 4])
    queue.add(1, [9, 9, 9, 9, 9])
    queue.add(2, [1, 2, 9, 9, 9])
    queue.add(3, [1, 2, 3, 4, 9])
    queue.add(4, [1, 2, 3, 4, 9], namespace=Namespace("tenant"))
    assert queue.keys == [3, 2, 1, 4]
    queue.cache([9, 9, 9, 9])
    assert queue.keys == [1, 3, 2, 4], "a new look when the cache has changed"
    queue.memory.flush()
    assert queue.keys == [1, 2, 3, 4]


def test_dfs_weight_follows_the_heaviest_branch() -> None:
    queue = Queue("dfs-weight")
    queue.cache([1, 1, 2, 2])
    queue.cache([1, 1, 3, 3])
    queue.cache([5, 5])
    queue.add(1, [5, 5, 0])
    queue.add(2, [1, 1, 2, 2, 0])
    queue.add(3, [1, 1, 3, 3, 0])
    queue.add(4, [1, 1, 3, 3, 1])
    queue.add(5, [1, 1, 0])
    queue.add(6, [7, 7, 0])
    assert queue.keys == [6, 5, 3, 4, 2, 1]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_long_queue_is_not_sorted(policy: str) -> None:
    queue = Queue(policy)
    queue.cache([1, 2])
    for key in range(1, SORT_LIMIT + 2):
        queue.add(key, [8, 8, 8])
    last = queue.add(SORT_LIMIT + 2, [1, 2, 3])
    assert queue.keys[0] == 1
    assert queue.policy.fallbacks
    for request in list(queue.policy)[:2]:
        queue.policy.remove(request)
    assert last.key in (queue.keys[0], queue.keys[-1])
    assert len(queue.keys) == SORT_LIMIT


def filled(policy: str, count: int) -> tuple[Queue, list[Sequence]]:
    queue = Queue(policy)
    queue.cache([1, 2, 3, 4])
    prompts = [[1, 2, 3, 4, 5], [1, 2, 9], [7], [1, 2, 3, 4]]
    return queue, [
        queue.add(
            key,
            prompts[key % 4],
            1 + key % 5,
            routing_key="ab"[key % 2],
            priority=key % 3,
            deadline=None if key % 3 else 40.0 - key,
        )
        for key in range(1, count + 1)
    ]


@pytest.mark.parametrize("policy", policy_names())
def test_requests_of_equal_rank_follow_each_other(policy: str) -> None:
    queue, requests = filled(policy, 24)
    for request in requests[:3]:
        queue.policy.remove(request)
        queue.policy.started(request)
    ranks = [queue.policy.rank(request) for request in queue.policy.order()]
    groups = [rank for rank, _ in groupby(ranks)]
    assert len(groups) == len(set(groups)), "two of equal rank have another one between them"
    expected = {"fcfs": 1, "random": 21, "priority": 3, "routing-key": 2}
    assert len(groups) == expected.get(policy, len(groups))
    assert policy == "fcfs" or len(groups) > 1


def test_a_policy_that_names_no_equals_is_obeyed_to_the_letter() -> None:
    class NewestFirst(Policy):
        def order(self) -> Iterator[Sequence]:
            return reversed(self._arrivals.values())

    queue = Queue("fcfs")
    queue.policy = NewestFirst(queue.memory)
    requests = [queue.add(key) for key in range(1, 5)]
    assert queue.keys == [4, 3, 2, 1]
    assert len({queue.policy.rank(request) for request in requests}) == 4


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_orders_exactly_those_that_wait(policy: str) -> None:
    queue, requests = filled(policy, 12)
    assert sorted(queue.keys) == list(range(1, 13))
    for request in requests[::2]:
        queue.policy.remove(request)
        queue.policy.started(request)
    assert sorted(queue.keys) == [request.key for request in requests[1::2]]
    assert len(queue.policy) == 6
    assert requests[0] not in queue.policy
    assert requests[1] in queue.policy
    if policy == "priority":
        assert queue.policy.eldest() is requests[1], "the first that came of the most important"
        queue.policy.remove(requests[1])
        assert queue.policy.eldest() is requests[7]
        queue.policy.add(requests[1])
    assert queue.policy.eldest() is requests[1]
    for request in requests[::2]:
        queue.policy.stopped(request)
        queue.policy.add(request)
    assert sorted(queue.keys) == list(range(1, 13))
    assert queue.policy.eldest() is requests[1 if policy == "priority" else 0]
    for request in requests:
        queue.policy.remove(request)
    assert queue.keys == []
    assert queue.policy.eldest() is None


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "random"])
def test_what_queues_behind_later_requests_is_as_if_it_had_come_after_them(policy: str) -> None:
    queue = Queue(policy)
    for key in (1, 2, 3, 4):
        queue.add(key, queue_behind=2 * (key - 1))
    assert queue.keys == [1, 2, 3, 4]
    later = [queue.add(key) for key in (5, 6, 7, 8, 9, 10, 11)]
    # Places 1, 4, 7 and 10; among equal places the first that came.
    assert queue.keys == [1, 2, 5, 6, 3, 7, 8, 9, 4, 10, 11]
    assert queue.policy.eldest() is next(queue.policy.order())
    for request in later:
        queue.policy.remove(request)
        assert request not in queue.policy
    assert queue.keys == [1, 2, 3, 4]
