"""Audit: every page, slot and row is held by the request that should hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.scheduling.scheduler import Scheduler

__all__ = ["audit", "check", "check_idle"]


def check(scheduler: Scheduler) -> None:
    """Assert conservation of pages and slots, in O(1)."""
    scheduler.memory.check()
    memory = scheduler.memory
    assert memory.slots.private == len(scheduler.queues.running) + memory.transfers.slots


def check_idle(scheduler: Scheduler) -> None:
    """Assert that nothing is held when no request and no step is left. O(1)."""
    check(scheduler)
    memory = scheduler.memory
    assert not scheduler.queues.has_unfinished
    private = memory.pages.private - memory.transfers.pages
    assert not private, f"{private} pages belong to no request"
    assert not memory.pages.fenced, f"{memory.pages.fenced} pages wait for a step that is not there"
    pool = None if memory.states is None else memory.states.pool
    assert pool is None or not pool.private + pool.fenced, "a snapshot belongs to no request"
    locks = 0 if memory.tree is None else memory.tree.num_locks - len(memory.transfers.departures)
    assert not locks, "a prefix is locked by no request"
    assert not scheduler.queues.queued_tokens


def audit(scheduler: Scheduler) -> None:
    """Assert by walking that every page, slot and row is where it should be."""
    memory, size = scheduler.memory, scheduler.memory.pages.page_size
    memory.audit(scheduler.queues.running.values())
    if memory.features is not None:
        memory.features.audit(scheduler.queues.prefilling.values())
    assert scheduler.queues.queued_tokens == sum(sequence.length for sequence in scheduler.queues.waiting)
    scheduler.queues.batch.audit()
    for sequence in scheduler.queues.running.values():
        assert sequence.key in scheduler.queues.prefilling or sequence.key not in scheduler.queues.growing
        places = sequence.cursor.in_batch + (sequence.key in scheduler.queues.prefilling)
        assert places <= 1
        arriving = sequence.kv.arrival is not None
        assert not (places and arriving), "it computes before its pages have arrived"
        assert arriving == (sequence.key in scheduler.queues.arriving)
        assert not (places and sequence.parked)
        assert sequence.cursor.computed <= len(sequence.kv.pages) * size, (
            "a position is computed without a page"
        )
        assert sequence.cursor.committed <= sequence.cursor.computed
