"""Blocks that the device cannot begin by itself: those with pins are reached by way of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from aioinfer.diffusion.pins import Pins, clash
from aioinfer.diffusion.state import BlockState
from aioinfer.params import SamplingParams
from aioinfer.scheduling.block_cursor import BlockCursor, RowInFlight

SIZE, MASK = 4, 99


def cursor(output: list[int], template: Sequence[int | None], max_tokens: int = 40) -> BlockCursor:
    params = SamplingParams(template=template, max_tokens=max_tokens)
    pins = partial(Pins.of, params)
    return BlockCursor(4, output, 4 + max_tokens, block_size=SIZE, monotone=True, pins=pins)


def written(start: int, ids: list[int], *, changed: bool = True) -> BlockState:
    """A block that is done, by one round."""
    state = BlockState.unknown(start, ids, SIZE, MASK)
    return replace(state, written_in=[0] * SIZE, rounds=1, done=True, changed=changed)


def follow(at: BlockCursor, output: list[int], state: BlockState) -> None:
    at.observe(state)
    for token, *_ in at.take_known():
        output.append(token)


def test_pins_behind_a_block_that_is_done_are_output() -> None:
    output: list[int] = []
    at = cursor(output, [None] * 4 + [7] * 6 + [None])
    at.rewind(4)
    follow(at, output, written(4, [1, 2, 3, 4]))
    assert output == [1, 2, 3, 4, *[7] * 6]
    assert at.step_map == [0] * 4 + [-1] * 6
    assert at.requeues
    # The block that is done is not in the KV, and neither are the pins.
    assert (at.block_start, at.committed) == (12, 4)
    at.rewind(at.committed)
    assert at.block is None
    assert not at.requeues


def test_the_device_goes_on_by_itself_where_the_next_block_is_all_hole() -> None:
    output: list[int] = []
    at = cursor(output, [None] * 8 + [7, None])
    at.rewind(4)
    follow(at, output, written(4, [1, 2, 3, 4]))
    assert not at.requeues
    assert at.next_round(fused=True, hold=False, pace=0.0) == (4, 2)


def test_no_row_follows_one_that_may_end_the_block_before_pins() -> None:
    at = cursor([], [None] * 4 + [7, None])
    at.rewind(4)
    at.flights.append(RowInFlight(4, 8))
    assert at.next_round(fused=True, hold=False, pace=1.0) == (4, 1)
    assert at.next_round(fused=True, hold=False, pace=4.0) is None


def test_the_row_in_flight_commits_the_block_before_pins() -> None:
    output: list[int] = []
    at = cursor(output, [None] * 4 + [7, None])
    at.rewind(4)
    at.flights.append(RowInFlight(4, 8))
    follow(at, output, written(4, [1, 2, 3, 4]))
    assert at.next_round(fused=True, hold=False, pace=1.0) is None
    at.flights.clear()
    follow(at, output, written(4, [1, 2, 3, 4], changed=False))
    assert output == [1, 2, 3, 4, 7]
    assert at.committed == 8


def test_a_closed_template_ends_its_last_block() -> None:
    pins = Pins.of(SamplingParams(template=[1, None, None], max_tokens=3), 2)
    assert pins is not None
    assert pins.writable(0, 8) == [False, False, False, True, True, False, False, False]
    opened = Pins.of(SamplingParams(template=[1, None, None], max_tokens=4), 2)
    assert opened is not None
    assert opened.writable(0, 8) == [False, False, False, True, True, True, True, True]
    begun = pins.put(BlockState.unknown(0, [8, 9], 4, MASK))
    assert (begun.ids, begun.known, begun.done) == ([8, 9, 1, MASK], [True, True, True, False], False)


def test_an_output_that_is_not_of_its_template_is_found() -> None:
    assert clash([None, 3, None], [1, 3, 4]) is None
    assert clash([None, 3, None], [1, 4]) == 1
    assert clash(None, [1]) is None
