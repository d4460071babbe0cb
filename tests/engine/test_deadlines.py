"""Deadlines: their forms, what is refused for them, and what is left of them elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer import InvalidRequest, Rejected, SamplingParams, StreamCheckpoint
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher
from aioinfer.scheduling.forecast import Forecast, Late
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.sequence import Sequence
from tests.engine.conftest import MakeEngine
from tests.parallel.toys import ENDLESS, PARAMS, STEP, Toy, attempt_of, end, prompt, toys, turn, virtual

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
SECOND = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)


async def learned(engine: Engine) -> None:
    """It has seen what steps take, and how long outputs are."""
    await asyncio.gather(*(engine.generate(prompt(seed), SECOND) for seed in range(5)))


def slack_engine(**settings: Any) -> Toy:
    return Toy(**{"policy": "slack", "max_running_requests": 2, "overlap_steps": 0, **settings})


# -- forms -------------------------------------------------------------------------------------------


async def test_a_timeout_of_asyncio_is_a_deadline(make_engine: MakeEngine) -> None:
    def deadline(limit: asyncio.Timeout) -> Any:
        stream = engine.generate([1, 2], deadline=limit)
        stream.close()
        return stream.cell.output.request.deadline

    async with make_engine(policy="slack") as engine:
        now = asyncio.get_running_loop().time()
        assert deadline(asyncio.timeout_at(now + 5000)) == pytest.approx(5000, abs=100)
        assert deadline(asyncio.timeout(None)) is None
        assert 0 < deadline(asyncio.timeout_at(now - 1)) < 1e-3
        async with asyncio.timeout(5000) as limit:
            assert len((await engine.generate([1, 2], SHORT, deadline=limit)).token_ids) == 3


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf"), "5", True])
async def test_other_deadlines_are_positive_numbers_of_seconds(
    make_engine: MakeEngine, deadline: Any
) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest, match="deadline: must be a positive number of seconds"):
            engine.generate([1, 2], deadline=deadline)


@virtual
async def test_a_deadline_ends_nothing_and_is_accepted_where_nothing_is_known() -> None:
    async with slack_engine() as engine:
        late = await engine.generate(prompt(0), SECOND, deadline=0.01)
        assert len(late.token_ids) == 100


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["slack", "fcfs", "lpm", "priority"])
def test_what_would_be_late_is_refused_and_accepted_when_it_said_so(policy: str) -> None:
    virtual(refused_and_accepted)(policy)


async def refused_and_accepted(policy: str) -> None:
    loop = asyncio.get_running_loop()
    async with slack_engine(policy=policy) as engine:
        await learned(engine)
        running = [engine.generate(prompt(seed), SECOND) for seed in range(4)]
        await asyncio.sleep(0.1)
        with pytest.raises(Rejected, match=r"after its deadline of 1\.2 s") as refused:
            engine.generate(prompt(9), SECOND, deadline=1.2)
        assert (refused.value.code, refused.value.full) == ("deadline", False)
        # With slack it goes before those that wait, which have no deadline.
        assert 0.2 < refused.value.retry_after < (1.2 if policy == "slack" else 1.8)
        await asyncio.sleep(refused.value.retry_after)
        begin = loop.time()
        await engine.generate(prompt(9), SECOND, deadline=1.2)
        assert loop.time() - begin == pytest.approx(1.2, abs=0.15)
        assert running[-1].done == (policy != "slack")
        await asyncio.gather(*running)


@virtual
async def test_what_has_begun_is_not_refused_when_it_goes_back_to_its_beginning() -> None:
    async with slack_engine() as engine:
        await learned(engine)
        stream = engine.generate(prompt(9), SECOND, deadline=1.2)
        await anext(stream)
        others = [engine.generate(prompt(seed), SECOND) for seed in range(4)]
        await asyncio.sleep(0.1)
        with pytest.raises(Rejected):
            stream.fork(1, at=0)
        beside = stream.fork_beside(0, [])
        stream.rewind(0)
        for each in (beside, stream):
            assert len((await each).token_ids) == 100
        await asyncio.gather(*others)


@virtual
async def test_requests_with_less_to_spare_go_first() -> None:
    order: list[str | None] = []

    async def ask(name: str, tokens: int, deadline: float | None) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        await engine.generate(prompt(7), params, deadline=deadline)
        order.append(name)

    async with slack_engine(max_running_requests=1) as engine:
        await learned(engine)
        async with asyncio.TaskGroup() as group:
            for each in (("first", 10, None), ("free", 10, None), ("loose", 10, 9.0), ("long", 500, 8.0),
                         ("tight", 10, 7.5)):  # fmt: skip
                group.create_task(ask(*each))
                await turn()
    assert order == ["first", "long", "tight", "loose", "free"]


@virtual
async def test_what_is_rewound_to_its_beginning_is_not_refused() -> None:
    async with slack_engine() as engine:
        await learned(engine)
        stream = engine.generate(prompt(0), SECOND, deadline=1.2)
        await asyncio.sleep(0.9)
        stream.rewind(0)
        assert len((await stream).token_ids) == 100
        with pytest.raises(Rejected):
            await stream.fork(at=0, deadline=0.5)[0]


@virtual
async def test_a_fork_has_what_is_left_of_its_parents_deadline_or_its_own() -> None:
    async with slack_engine() as engine:
        stream = engine.generate(prompt(0), SECOND, deadline=100.0)
        await asyncio.sleep(0.5)
        async with asyncio.timeout(None) as limit:
            limit.reschedule(asyncio.get_running_loop().time() + 7)
            forks = [*stream.fork(), *stream.fork(deadline=limit), *stream.fork(deadline=None)]
            left = [each.cell.output.request.deadline for each in forks]
            assert left == [pytest.approx(99.5), pytest.approx(7.0), None]
            await asyncio.gather(*forks)


@virtual
async def test_a_map_goes_on_after_a_row_that_would_be_late() -> None:
    async with slack_engine() as engine:
        await learned(engine)
        options: Any = {"deadline": 1.2, "on_error": "return", "concurrency": 8}
        found = [each async for each in engine.map(list(map(prompt, range(8))), SECOND, **options)]
        refused = [each for each in found if isinstance(each, Rejected)]
        assert 2 <= len(refused) <= 6
        assert {each.code for each in refused} == {"deadline"}
        with pytest.raises(Rejected):
            [_ async for _ in engine.map(list(map(prompt, range(8))), SECOND, concurrency=8, deadline=1.2)]


# -- what is left of it ------------------------------------------------------------------------------


@virtual
async def test_a_checkpoint_has_what_is_left_of_a_deadline() -> None:
    async with slack_engine() as engine:
        stream = engine.generate(prompt(0), SECOND, deadline=5.0)
        await asyncio.sleep(0.5)
        checkpoint = StreamCheckpoint.from_json(stream.checkpoint().to_json())
        assert checkpoint.deadline == pytest.approx(4.5)
        stream.close()
        await learned(engine)
        again = engine.restore(checkpoint)
        assert again.cell.output.request.deadline == pytest.approx(4.5)
        again.close()
        tight = engine.restore(checkpoint, deadline=0.01)
        assert len((await tight).token_ids) == 100, "what has begun is not refused"
        assert engine.generate(prompt(1), SECOND).checkpoint().deadline is None


@virtual
async def test_a_replica_gets_what_is_left_of_a_deadline() -> None:
    engines = toys(2, max_running_requests=1, policy="slack")
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        running = [dispatcher.generate(prompt(number), ENDLESS) for number in range(2)]
        waits = dispatcher.generate(prompt(2), PARAMS, deadline=5.0)
        await asyncio.sleep(1.0)
        running[0].close()
        while attempt_of(waits) is None:
            await asyncio.sleep(STEP / 10)
        requests = [each.output.request for each in engines[0]._serving().open]
        (left,) = [each.deadline for each in requests if each.deadline is not None]
        assert left == pytest.approx(4.0, abs=3 * STEP)
        await end(running)


@pytest.mark.parametrize("limit", ["deadline", "ttft_target"])
def test_a_dispatcher_ends_what_a_replica_finds_too_late(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    def late(forecast: Forecast, queues: RequestQueues, sequence: Sequence, now: float) -> Late:
        return Late(limit, 12.4, 7.4)

    @virtual
    async def course() -> None:
        async with Dispatcher([Toy(max_running_requests=2)]) as dispatcher:
            running = [dispatcher.generate(prompt(number), ENDLESS) for number in range(2)]
            await turn()
            options: dict[str, Any] = {limit: 5.0}
            refused = dispatcher.generate(prompt(2), PARAMS, **options)
            running[0].close()
            with pytest.raises(Rejected) as found:
                await refused
            assert found.value.code == limit
            await end(running)

    monkeypatch.setattr(Forecast, "late", late)
    course()


def test_a_config_knows_the_policy() -> None:
    assert EngineConfig(policy="slack").policy == "slack"
