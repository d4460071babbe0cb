"""Requests that arrive together begin a few at a time, and those of clients that have left cost nothing."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer.server.http.pace import _AT_ONCE, Arrivals


async def _turns(count: int, arrivals: Arrivals) -> tuple[list[int], list[asyncio.Task[None]]]:
    """In which turn of the loop each of ``count`` requests began, a list that is filled as they begin."""
    turns, began = [0], list[int]()

    async def request() -> None:
        await arrivals()
        began.append(turns[-1])

    tasks = [asyncio.create_task(request()) for _ in range(count)]
    for turn in range(count):
        turns.append(turn)
        await asyncio.sleep(0)
    return began, tasks


async def test_a_few_of_a_burst_begin_in_each_turn_in_order() -> None:
    began, tasks = await _turns(50, Arrivals())
    assert len(began) == 50
    assert all(each.done() for each in tasks)
    assert began == sorted(began)
    assert max(began.count(turn) for turn in began) == _AT_ONCE


async def test_a_request_alone_begins_at_once() -> None:
    arrivals = Arrivals()
    for _ in range(20):
        coroutine = arrivals()
        with pytest.raises(StopIteration):
            coroutine.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_cancelled_requests_take_nobody_s_turn() -> None:
    arrivals = Arrivals()
    order = list[int]()

    async def request(number: int) -> None:
        await arrivals()
        order.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(40)]
    await asyncio.sleep(0)
    for task in tasks[_AT_ONCE:30]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [*range(_AT_ONCE), *range(30, 40)]


def test_a_loop_that_ended_in_the_middle_leaves_no_turn_behind() -> None:
    arrivals = Arrivals()

    async def burst() -> None:
        for _ in range(_AT_ONCE):
            await arrivals()

    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(burst())
        loop.close()
