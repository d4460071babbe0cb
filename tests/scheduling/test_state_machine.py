"""The scheduler's state machine keeps the laws, and finds the bugs that are planted in what it drives."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from aioinfer.cache.fenced import FencedPool
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.radix import RadixTree
from aioinfer.cache.slots import SlotPool
from aioinfer.scheduling import scheduler as scheduling
from aioinfer.scheduling import token_batch
from aioinfer.scheduling.admission import PrefixLeaders
from aioinfer.scheduling.cursor import TokenCursor
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.recovery import StepCap
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import ParkedFor, Sequence, SequenceState
from aioinfer.scheduling.step import Outcome, Row, Step
from aioinfer.scheduling.token_batch import TokenBatch
from tests.planted_bugs import assert_found
from tests.scheduling.machine import TOKENS, SchedulerMachine
from tests.tiers import PLANTED_BUG, nightly, scaled

LAWFUL = settings(
    max_examples=scaled(120, 40), stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_the_scheduler_keeps_the_laws() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=LAWFUL)  # type: ignore[no-untyped-call]


# -- planted bugs --------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def pages_without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageAllocator, "give", lambda self, items, fence: FencedPool.give(self, items, 0))


@mutant
def slots_without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "give", lambda self, items, fence: FencedPool.give(self, items, 0), raising=False)


@mutant
def fence_of_the_next_result(patch: pytest.MonkeyPatch) -> None:
    def give(self: PageAllocator, items: Any, fence: int) -> None:
        FencedPool.give(self, items, min(fence, self.last_resolved + 1))

    patch.setattr(PageAllocator, "give", give)


@mutant
def cached_pages_without_fence(patch: pytest.MonkeyPatch) -> None:
    unlock = RadixTree.unlock
    patch.setattr(RadixTree, "unlock", lambda self, lock, fence: unlock(self, lock, 0))


@mutant
def release_by_token_count(patch: pytest.MonkeyPatch) -> None:
    release = Memory.release

    def by_tokens(self: Memory, request: Sequence) -> None:
        del request.kv.pages[max(request.kv.cached_pages, self.pages.pages_for(request.known)) :]
        release(self, request)

    patch.setattr(Memory, "release", by_tokens)


@mutant
def committed_before_it_resolved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenCursor, "committed", property(lambda self: min(self.computed, self.known)))


@mutant
def unlocked_twice(patch: pytest.MonkeyPatch) -> None:
    unlock = RadixTree.unlock

    def twice(self: RadixTree, lock: Any, fence: int) -> Any:
        node = lock.node
        unlock(self, lock, fence)
        lock._node = node
        return unlock(self, lock, fence)

    patch.setattr(RadixTree, "unlock", twice)


@mutant
def late_token_delivered(patch: pytest.MonkeyPatch) -> None:
    resolve = Scheduler.resolve

    def late(self: Scheduler, step: Step, outcome: Outcome) -> list[Sequence]:
        for row, token in zip(step.rows, outcome.tokens, strict=True):
            if row.samples and row.request.finished:
                row.request.output_ids.append(token)
        return resolve(self, step, outcome)

    patch.setattr(Scheduler, "resolve", late)


@mutant
def retraction_forgets_pending_tokens(patch: pytest.MonkeyPatch) -> None:
    restart = TokenCursor.restart

    def forgetful(self: TokenCursor, cached: int = 0) -> None:
        restart(self, cached)
        self._sampled = len(self._output_ids)

    patch.setattr(TokenCursor, "restart", forgetful)


@mutant
def chunk_of_a_former_life_commits(patch: pytest.MonkeyPatch) -> None:
    resolve_chunk = token_batch._resolve_chunk

    def former(
        step: Step, row: Row, token: int, forced: abc.Sequence[int], queues: RequestQueues
    ) -> abc.Sequence[Sequence]:
        if not row.request.finished and not row.samples:
            row.request.cursor.commit_prefill(row.kv_length, last=False)
            if row.request.kv.lock is not None:
                queues.share(row.request)
            return ()
        return resolve_chunk(step, row, token, forced, queues)

    patch.setattr(token_batch, "_resolve_chunk", former)


@mutant
def column_stays_when_its_row_moves(patch: pytest.MonkeyPatch) -> None:
    remove = TokenBatch.remove

    def half(self: TokenBatch, request: Sequence) -> None:
        index = request.cursor.row
        before = self._columns[:, index].copy()
        remove(self, request)
        self._columns[:, index] = before

    patch.setattr(TokenBatch, "remove", half)


@mutant
def new_pages_not_told(patch: pytest.MonkeyPatch) -> None:
    def only_capacity(self: TokenBatch, request: Sequence) -> None:
        self.capacity[request.cursor.row] = len(request.kv.pages) * self._page_size

    patch.setattr(TokenBatch, "changed_pages", only_capacity)


@mutant
def exchanged_pages_not_told(patch: pytest.MonkeyPatch) -> None:
    commit = Memory.commit

    def silent(self: Memory, request: Sequence, fence: int) -> bool:
        sent = request.kv.sent_pages
        commit(self, request, fence)
        request.kv.sent_pages = sent
        return False

    patch.setattr(Memory, "commit", silent)


@mutant
def namespaces_mixed_up(patch: pytest.MonkeyPatch) -> None:
    lock, find = RadixTree.lock, RadixTree.find
    patch.setattr(RadixTree, "lock", lambda self, key, namespace="": lock(self, key))
    patch.setattr(RadixTree, "find", lambda self, key, namespace="": find(self, key))


@mutant
def parked_ones_go_on(patch: pytest.MonkeyPatch) -> None:
    def park(self: RequestQueues, request: Sequence, waits: ParkedFor) -> None:
        if not request.finished and request.state is SequenceState.RUNNING:
            request.parked_for |= {waits}

    patch.setattr(RequestQueues, "park", park)


@mutant
def leaders_stay_when_they_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixLeaders, "leave", lambda self, request: None)


@mutant
def nobody_is_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_victim", lambda self: None)


@mutant
def the_eldest_is_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_victim", lambda self: next(iter(self.queues.running.values()), None))


@mutant
def junk_behind_a_step_that_ran_out_is_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_batch, "without_junk", lambda step, tokens: tokens)


@mutant
def tokens_in_flight_outlive_their_step(patch: pytest.MonkeyPatch) -> None:
    def half(self: RequestQueues, request: Sequence) -> None:
        if request.state is SequenceState.RUNNING:
            self.retract(request)

    patch.setattr(RequestQueues, "start_over", half)


@mutant
def only_running_requests_run_out(patch: pytest.MonkeyPatch) -> None:
    start_over = RequestQueues.start_over

    def running_only(self: RequestQueues, request: Sequence) -> None:
        if request.state is SequenceState.RUNNING:
            start_over(self, request)

    patch.setattr(RequestQueues, "start_over", running_only)


@mutant
def a_chunk_of_a_former_life_runs_out(patch: pytest.MonkeyPatch) -> None:
    def all_that_run(step: Step) -> list[Sequence]:
        running = [each for each in step.requests if each.state is SequenceState.RUNNING]
        return [request for request in running if step.id > request.recovery.void_until]

    patch.setattr(scheduling, "struck", all_that_run)


@mutant
def running_out_is_forgiven_for_ever(patch: pytest.MonkeyPatch) -> None:
    run_out = Scheduler.run_out

    def forgiving(self: Scheduler, step: Step, error: BaseException) -> list[Sequence]:
        for request in step.requests:
            request.recovery.ran_out_at = -1
        return run_out(self, step, error)

    patch.setattr(Scheduler, "run_out", forgiving)


@mutant
def running_out_is_never_forgiven(patch: pytest.MonkeyPatch) -> None:
    run_out = Scheduler.run_out

    def unforgiving(self: Scheduler, step: Step, error: BaseException) -> list[Sequence]:
        for request in step.requests:
            if request.recovery.ran_out_at >= 0:
                request.recovery.ran_out_at = request.known
        return run_out(self, step, error)

    patch.setattr(Scheduler, "run_out", unforgiving)


@mutant
def the_next_step_asks_for_as_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepCap, "ran_out", lambda self, step, newest: None)


class Crowded(SchedulerMachine):
    """Short chunks, small pages, many in flight: where lives follow each other most quickly."""

    fixed: ClassVar[dict[str, Any]] = {
        "page_size": 1,
        "pages": 30,
        "prefix_cache": True,
        "window": 2,
        "max_running_requests": 5,
        "chunk_size": 2,
        "more_tokens": 30,
        "share_prefix_tokens": 0,
        "mixed": True,
    }


class Scarce(Crowded):
    """Steps run out of memory, and those between them bring tokens."""

    @precondition(lambda self: self.flights)
    @rule(luck=TOKENS)
    def run_out_again(self, luck: abc.Sequence[int]) -> None:
        """As soon as a request that ran out has got on."""
        self.run_out()
        behind = {key: life.ran_out_at for key, life in self.lives.items() if life.ran_out_at is not None}
        for _ in range(50):
            self.run(1, luck)
            if any(len(self.lives[key].delivered) > count for key, count in behind.items()):
                break
        if self.flights:
            self.run_out()


#: bugs that only many lives side by side bring to light
CROWDED = {
    "chunk_of_a_former_life_commits",
    "junk_behind_a_step_that_ran_out_is_delivered",
    "only_running_requests_run_out",
    "a_chunk_of_a_former_life_runs_out",
}
#: or steps that run out of memory time and again
SCARCE = {"running_out_is_never_forgiven"}


@nightly(PLANTED_BUG)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert_found(Crowded if name in CROWDED else Scarce if name in SCARCE else SchedulerMachine)
