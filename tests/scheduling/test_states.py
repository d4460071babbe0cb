"""Recurrent state by slot: which cell each row reads and writes, and what is kept for others."""

from __future__ import annotations

import pytest

from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling.audit import check_idle
from tests.scheduling.cells import bring, course, desk, rows

# -- where snapshots are taken ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (3, [(0, 3, "empty", "slot")]),
        (4, [(0, 4, "empty", "slot")]),
        (5, [(0, 4, "empty", "kept"), (4, 5, "kept", "slot")]),
        (8, [(0, 4, "empty", "kept"), (4, 8, "kept", "slot")]),
        (11, [(0, 8, "empty", "kept"), (8, 11, "kept", "slot")]),
    ],
)
def test_a_prompt_leaves_a_snapshot_at_its_last_boundary_with_a_token_behind(
    length: int, expected: list[tuple[int, int, str, str]]
) -> None:
    at = desk()
    request = at.submit(length)
    assert course(at, request) == expected
    assert at.memory.snapshots_cached == len(expected) - 1
    at.plan()
    assert [(row.state_read, row.state_write) for row in rows(at)] == [(request.kv.slot, request.kv.slot)]


def test_chunks_that_end_elsewhere_leave_their_state_in_the_slot() -> None:
    at = desk(chunk_size=4)
    assert course(at, at.submit(14)) == [
        (0, 4, "empty", "slot"),
        (4, 8, "slot", "slot"),
        (8, 12, "slot", "kept"),
        (12, 14, "kept", "slot"),
    ]


def test_a_snapshot_that_saves_little_is_not_worth_a_step() -> None:
    at = desk(snapshot_tokens=8)
    common = list(range(100, 112))
    assert course(at, at.submit(common[:8])) == [(0, 8, "empty", "slot")]
    assert course(at, at.submit(common[:9])) == [(0, 8, "empty", "kept"), (8, 9, "kept", "slot")]
    at.finish()
    # Behind the snapshot that it starts from, four tokens are left up to its last boundary.
    assert course(at, at.submit([*common, 7])) == [(8, 13, "kept", "slot")]
    at.finish()
    assert course(at, at.submit([*common, *range(9)])) == [(8, 20, "kept", "kept"), (20, 21, "kept", "slot")]


def test_the_same_prompt_starts_from_the_snapshot() -> None:
    at = desk()
    ids = list(range(100, 111))
    at.submit(ids)
    at.finish()
    again = at.submit(ids)
    assert course(at, again) == [(8, 11, "kept", "slot")]
    assert again.output.cached_tokens == 8
    assert at.memory.snapshot_hits == 1


def test_where_prompts_part_the_second_leaves_a_snapshot_for_the_third() -> None:
    at = desk()
    common = list(range(100, 112))
    at.submit([*common, *range(20)])
    at.finish()
    second = at.submit([*common, *range(50, 57)])
    assert course(at, second) == [
        (0, 12, "empty", "kept"),
        (12, 16, "kept", "kept"),
        (16, 19, "kept", "slot"),
    ]
    assert second.output.cached_tokens == 0, "pages without a state behind them are of no use"
    third = at.submit([*common, 80, 81])
    assert course(at, third) == [(12, 14, "kept", "slot")]
    at.finish()
    check_idle(at.scheduler)


def test_whoever_waits_for_a_prefix_says_where_it_ends() -> None:
    """Those that arrive together compute what they have in common once."""
    at = desk(share_prefix_tokens=8)
    common = list(range(100, 113))
    requests = [at.submit([*common, *range(20 * number, 20 * number + 9)]) for number in range(1, 5)]
    at.finish()
    assert [request.output.cached_tokens for request in requests] == [0, 12, 12, 12]
    assert at.memory.pages.fenced == 0
    check_idle(at.scheduler)


def test_the_output_of_a_request_is_found_by_the_next_turn() -> None:
    """Up to the boundary of the prompt at first; then a snapshot is left behind the answer, too."""
    at = desk()
    prompt = list(range(100, 110))
    first = at.submit(prompt, 11)
    at.finish()
    history = [*prompt, *first.output_ids]
    second = at.submit([*history, 1, 2, 3])
    assert course(at, second)[0] == (8, 20, "kept", "kept")
    again = at.submit([*history, 5])
    assert course(at, again) == [(20, 22, "kept", "slot")]


def test_without_snapshots_nothing_is_matched_and_chunks_are_not_cut() -> None:
    for at in (desk(0), desk(4, prefix_cache=False)):
        ids = list(range(100, 120))
        for _ in range(2):
            request = at.submit(ids)
            assert course(at, request) == [(0, 20, "empty", "slot")]
            assert request.output.cached_tokens == 0
            at.finish()
        check_idle(at.scheduler)
        assert at.memory.pages.free == at.memory.pages.total


# -- the budget ------------------------------------------------------------------------------------------


def test_a_snapshot_that_a_step_in_flight_reads_is_not_written() -> None:
    at = desk(1)
    ids = list(range(100, 111))
    at.submit(ids)
    at.finish()
    reader = at.submit(ids)
    at.plan()
    assert rows(at)[0].state_read == at.memory.slots.total + 1
    other = at.submit(11)
    at.plan()
    chunk = next(row for row in rows(at) if row.sequence is other)
    assert (chunk.start, chunk.length, chunk.state_write) == (0, 11, other.kv.slot), "it goes without"
    at.resolve()
    assert reader.known == other.known + 1 == 13
    third = at.submit(11)
    assert course(at, third)[0] == (0, 8, "empty", "kept")


# -- what is not shared ----------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_what_is_flushed_while_it_is_computed_is_not_found(behind: int) -> None:
    at = desk()
    ids = list(range(100, 111))
    request = at.submit(ids)
    for _ in range(behind + 1):
        at.plan()
    at.memory.flush()
    at.finish()
    assert request.known == 15
    assert not at.memory.snapshots_cached
    again = at.submit(ids)
    assert course(at, again) == [(0, 8, "empty", "kept"), (8, 11, "kept", "slot")]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_failed_leaves_no_snapshot(failing: int) -> None:
    at = desk()
    request = at.submit(11)
    for _ in range(3):
        at.plan()
    for _ in range(failing):
        bring(at, 42)
    at.scheduler.fail(at.flights.pop(0), RuntimeError())
    assert request.finished
    while at.flights:
        bring(at, 42)
    assert not at.memory.snapshots_cached
    check_idle(at.scheduler)


def test_bad_logits_take_back_what_an_earlier_life_left_behind_the_snapshot() -> None:
    at = desk()
    request = at.submit(11, 30)
    for _ in range(14):
        at.round()
    at.scheduler.queues.retract(request)
    assert at.memory.tree is not None
    assert at.memory.tree.match(request.token_key(0, 20)) == 5
    at.plan()
    assert rows(at)[0].start == 8
    bring(at, 42)
    at.plan()
    bring(at, BAD_LOGITS)
    assert request.output.finish_reason == "abort"
    assert at.memory.tree.match(request.token_key(0, 20)) == 0
    check_idle(at.scheduler)
