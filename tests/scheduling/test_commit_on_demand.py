"""Pages of running requests that are offered to others on demand: whole, resolved, and never rewritten."""

from __future__ import annotations

import pytest

from aioinfer.cache.radix import token_key
from aioinfer.diffusion.state import BlockState
from aioinfer.sampling.outcomes import FORCED
from aioinfer.scheduling.audit import audit, check_idle
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.sequence import Sequence
from tests.scheduling.desk import Desk


def found(desk: Desk, request: Sequence) -> int:
    """Tokens of a request that others would find, at most."""
    assert desk.memory.tree is not None
    ids = [*request.prompt_ids, *request.output_ids]
    return desk.memory.tree.match(token_key(ids), request.namespace) * desk.memory.pages.page_size


def commit(desk: Desk, request: Sequence) -> int:
    desk.scheduler.queues.share(request)
    audit(desk.scheduler)
    return request.kv.cached_pages * desk.memory.pages.page_size


def test_what_is_resolved_is_found_at_every_page_boundary() -> None:
    desk = Desk(page_size=4)
    request = desk.submit(6, 20)
    desk.round()
    assert found(desk, request) == 4, "the prompt's pages"
    for _ in range(12):
        desk.round()
        known = request.known
        assert commit(desk, request) == found(desk, request) == (known - 1) // 4 * 4
    other = desk.submit([*request.prompt_ids, *request.output_ids, 5], 4)
    desk.finish()
    assert other.output.cached_tokens == 16
    check_idle(desk.scheduler)


def test_what_steps_in_flight_write_is_not_offered() -> None:
    desk = Desk(page_size=2, overlap_steps=2)
    request = desk.submit(3, 20)
    desk.round()
    flights = [desk.launch() for _ in range(3)]
    assert request.cursor.computed == 6
    assert commit(desk, request) == found(desk, request) == 2
    for flight in flights:
        desk.bring(flight)
    assert commit(desk, request) == 6


def test_a_prefix_that_another_request_had_first_takes_the_place_of_ones_own() -> None:
    """The step in flight reads the pages that are given up: they come back behind it."""
    desk = Desk(page_size=2, share_prefix_tokens=0)
    one, other = desk.submit([1, 2, 3], 20), desk.submit([1, 2, 3], 20)
    desk.round()
    for _ in range(3):
        desk.round()
    step = desk.launch()
    assert commit(desk, one) == 6
    before = other.kv.pages[:3]
    assert commit(desk, other) == 6
    assert other.kv.pages[:3] == one.kv.pages[:3] != before
    assert desk.memory.pages.fenced == 2
    desk.bring(step)
    assert desk.memory.pages.fenced == 0
    tables = {slot: (first, [*pages]) for slot, first, pages in desk.launch().generating.tables}
    first, pages = tables[other.kv.slot]
    assert first <= 1, "the device is told"
    assert pages[: 3 - first] == one.kv.pages[first:3]


def test_a_flushed_request_offers_nothing_more() -> None:
    desk = Desk(page_size=2)
    request = desk.submit(4, 20)
    desk.round()
    desk.memory.flush()
    for _ in range(4):
        desk.round()
    assert commit(desk, request) == 4
    assert found(desk, request) == 0


def test_forced_tokens_do_not_rewrite_what_was_offered() -> None:
    desk = Desk(page_size=2)
    request = desk.submit(4, 20)
    desk.round()
    for _ in range(3):
        desk.round()
    assert commit(desk, request) == 6
    assert desk.bring(desk.launch(), FORCED, forced=[8, 9]) == [request]
    (row,) = desk.launch().rows
    assert row.start >= 6
    assert found(desk, request) == 6


@pytest.mark.parametrize("snapshots", [4, 1])
def test_a_recurrent_model_offers_pages_and_is_found_up_to_its_state(snapshots: int) -> None:
    desk = Desk(page_size=4, snapshots=snapshots)
    request = desk.submit(10, 20)
    for _ in range(8):
        desk.round()
        commit(desk, request)
    assert found(desk, request) == 16
    assert desk.memory.tree is not None
    ids = [*request.prompt_ids, *request.output_ids]
    assert desk.memory.tree.find(token_key(ids), request.namespace)[0] == 2, (
        "of the prompt: it was kept there"
    )
    other = desk.submit([*ids, 5], 4)
    desk.finish()
    assert other.output.cached_tokens == 8
    check_idle(desk.scheduler)


def test_a_block_that_is_done_is_offered_when_the_next_one_is_begun() -> None:
    """It may be computed once more until then, beside the next one."""
    cursor = BlockCursor(4, [], 40, block_size=4, monotone=True)
    cursor.commit_prefill(4, last=True)
    done = BlockState(4, [1] * 4, [True] * 4, [0] * 4, [0.0] * 4, 2, done=True, changed=False, failed=False)
    cursor.observe(done)
    cursor._output_ids += [1] * 4
    assert (cursor.committed, cursor.settled) == (8, 4)
    assert cursor.next_round(fused=False, hold=True, pace=1.0) == (4, 1), "as it may be"
    cursor.observe(
        BlockState(8, [1] * 4, [False] * 4, [0] * 4, [0.0] * 4, 1, done=False, changed=True, failed=False)
    )
    assert cursor.settled == 8
