"""A stream whose replica is lost goes on in another one: ids, text, logprobs, reasons and usage are those of
a stream that nothing happened to."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, EngineFailed
from aioinfer.execution.device import DeviceLost
from aioinfer.outputs import Result, TokenLogprob
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.replica import Attempt, Diverged
from aioinfer.parallel.rows import Rows
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream
from examples.training.tasks import TASKS, held_out
from tests.engine.test_logits_processors import Counting, CountingLater, next_one, next_one_later
from tests.engine.test_restoring import DIFFUSION, KINDS, THINKS, same
from tests.model.harness import require
from tests.parallel.toys import Toy, attempt_of, lose_engine, record, virtual
from tests.tiers import SECONDS, grid, rest


def toy(seed: int, **settings: Any) -> Engine:
    """Seconds of its steps are dice."""
    dice = random.Random(seed)
    return Toy(
        seconds=lambda _: dice.choice([0.001, 0.01]),
        longest=96,
        seed=seed,
        page_size=(4, 8)[seed % 2],
        num_pages=64,
        overlap_steps=(0, 2)[seed % 2],
        deterministic=True,
        max_running_requests=8,
        **THINKS,
        **settings,
    )


def lose(replica: Any, cause: str = "it is gone") -> None:
    lose_engine(replica.engine, DeviceLost(cause))


#: a result, and what was read of it: text, ids and logprobs
Found = tuple[Result, str, list[int], list[TokenLogprob]]


async def read(stream: Stream, moved: Callable[[int], None] = lambda count: None) -> Found:
    """``moved`` is told of the tokens of each chunk."""
    text, ids, logprobs = "", list[int](), list[TokenLogprob]()
    async for chunk in stream:
        text += chunk.text
        ids += chunk.token_ids
        logprobs += chunk.logprobs or ()
        moved(len(chunk.token_ids))
    return stream.result(), text, ids, logprobs


async def interrupted(
    dispatcher: Dispatcher, prompt: Any, params: SamplingParams, at: int
) -> tuple[Found, bool]:
    """A stream whose replica is lost once it has ``at`` tokens, and whether it was lost at all. It comes back
    afterwards."""
    stream = dispatcher.generate(prompt, params)
    found, lost = record(stream), False

    async def loses() -> None:
        nonlocal lost
        while not found.output.ended:
            if (attempt := dispatcher._started().attempts.get(found)) and len(found.output.token_ids) >= at:
                lost = True
                lose(attempt.replica)
                return
            await asyncio.sleep(0.0002)

    losing = asyncio.ensure_future(loses())
    whole = await read(stream)
    await losing
    for each in dispatcher.stats().replicas:
        if each.state == "lost":
            await dispatcher.restart(each.name)
    return whole, lost


def check_same(found: Found, wanted: Result) -> None:
    result, *chunks = found
    same(result, wanted)
    assert chunks == [wanted.text, wanted.token_ids, wanted.logprobs or []]
    assert result.identical


def toy_requests() -> list[tuple[list[int], SamplingParams]]:
    """With every parameter that the toy has."""
    rng = random.Random(7)
    asked = []
    for number, kind in enumerate(KINDS.values()):
        if "grammar" in kind or "bad_words" in kind:
            continue
        chosen = {
            name: [token % 64 for token in value]
            if name in ("stop_token_ids", "allowed_token_ids")
            else value
            for name, value in kind.items()
        }
        if "stop" in chosen:
            chosen["stop"] = ("q", "zz")
        # Every other one has the seed that the dispatcher draws.
        seed = number if number % 2 else None
        prompt = [rng.randrange(1, 64) for _ in range(rng.randint(1, 9))]
        asked.append((prompt, SamplingParams(seed=seed, max_tokens=24, **chosen)))
    return asked


async def test_logits_processors_go_on_in_another_replica() -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logits_processors=[each])
        for each in (next_one, next_one_later, Counting(), CountingLater())
    ]
    async with Dispatcher([toy(1), toy(2)]) as dispatcher:
        for each in params:
            wanted = await dispatcher.generate([5, 6, 7], each)
            for at in range(0, len(wanted.token_ids), 5):
                found, _ = await interrupted(dispatcher, [5, 6, 7], each, at)
                check_same(found, wanted)


async def lose_everywhere(every: int = 1) -> int:
    """Lose the replica of every kind of request at every token; how many were lost."""
    losses = 0
    async with Dispatcher([toy(1), toy(2)]) as dispatcher:
        running = dispatcher._started()
        for prompt, params in toy_requests():
            seeds = running._seeds.getstate()
            wanted = await dispatcher.generate(prompt, params)
            for at in range(0, len(wanted.token_ids), every):
                running._seeds.setstate(seeds)
                found, lost = await interrupted(dispatcher, prompt, params, at)
                check_same(found, wanted)
                assert found[0].resumed == 0
                times = found[0].metrics.token_times  # type: ignore[union-attr]
                assert list(times) == sorted(times)
                losses += lost
        assert running.diverged == 0
        assert running.resumed >= losses / 2
    return losses


@rest(SECONDS)
@pytest.mark.parametrize("every", grid([5], [1]))
@virtual
async def test_a_replica_may_be_lost_at_any_token(every: int) -> None:
    assert await lose_everywhere(every) > 200 / every


# -- poison, and what a caller may choose --------------------------------------------------------------


@virtual
async def test_a_request_ends_with_the_second_replica_that_is_lost_at_the_same_token() -> None:
    async with Dispatcher([toy(1), toy(2), toy(3)]) as dispatcher:
        other = dispatcher.generate([7, 7], SamplingParams(max_tokens=60, ignore_eos=True))
        stream = dispatcher.generate([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(5):
            await anext(stream)
        lose(attempt_of(stream).replica, "first")
        while attempt_of(stream) is None:
            await asyncio.sleep(0.0001)
        lose(attempt_of(stream).replica, "second")
        with pytest.raises(EngineFailed, match="first; second") as failed:
            async for _ in stream:
                pass
        assert str(failed.value.__cause__) == "second"
        assert dispatcher.ready
        assert dispatcher.degraded
        # The third one has never seen it.
        assert (await other).finish_reason == "length"


@virtual
async def test_a_stream_outlives_as_many_replicas_as_it_has_tokens_between() -> None:
    async with Dispatcher([toy(1), toy(2)]) as dispatcher:
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3)
        wanted = await dispatcher.generate([1, 2, 3], params)
        stream = dispatcher.generate([1, 2, 3], params)
        losses, ids = 0, list[int]()
        async for chunk in stream:
            ids += chunk.token_ids
            if len(ids) > 8 * (losses + 1) and attempt_of(stream) is not None:
                lost = attempt_of(stream).replica
                lose(lost)
                await dispatcher.restart(lost.name)
                losses += 1
        assert losses >= 4
        same(stream.result(), wanted)
        assert ids == wanted.token_ids


@pytest.mark.parametrize(("on_loss", "other"), [("continue", True), ("identical", True), ("fail", False)])
@virtual
async def test_a_caller_chooses_what_becomes_of_a_stream(on_loss: Any, other: bool) -> None:
    """``other``: the replica that is left has another arithmetic."""
    engines = [toy(1), toy(2, **({"quantization": "int8"} if other else {}))]
    async with Dispatcher(engines, on_loss=on_loss, policy="round_robin") as dispatcher:
        stream = dispatcher.generate([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
        await anext(stream)
        lose(attempt_of(stream).replica)
        if on_loss == "continue":
            result = await stream
            assert len(result.token_ids) == 40
            assert not result.identical
        else:
            with pytest.raises(EngineFailed):
                await stream
        # What has not begun goes anywhere.
        assert len((await dispatcher.generate([1], SamplingParams(max_tokens=3))).token_ids) <= 3


@virtual
async def test_with_the_last_replica_all_streams_end_and_work_goes_on_when_one_joins() -> None:
    async with Dispatcher([toy(1), toy(2)]) as dispatcher:
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        streams = [dispatcher.generate([number, 5], params) for number in range(1, 30)]
        await anext(streams[0])
        for replica in list(dispatcher._replicas):
            lose(replica, f"end of {replica.name}")
        for stream in streams:
            with pytest.raises(EngineFailed, match="end of local"):
                await stream
        assert not dispatcher.ready
        with pytest.raises(EngineFailed, match="no replica is left: local-0: end of local-0; local-1"):
            dispatcher.generate([1])
        await dispatcher.restart("local-1")
        assert dispatcher.ready
        assert len((await dispatcher.generate([1], params)).token_ids) == 50
        assert [each.state for each in dispatcher.stats().replicas] == ["lost", "ready"]


@virtual
async def test_survivors_take_interrupted_streams_half_a_step_at_a_time() -> None:
    """Their own streams go on meanwhile."""
    engines = [toy(number, max_step_tokens=32, chunk_size=32) for number in (2, 4)]
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        streams = [dispatcher.generate([number] * 40, params) for number in range(1, 9)]
        for stream in streams:
            await anext(stream)
        survivor, lost = dispatcher._replicas
        lose(lost)
        most = 0
        while any(not stream.done for stream in streams):
            most = max(most, survivor.load.resuming)
            await asyncio.sleep(0.0005)
        # Less than half a step, and one more.
        assert 0 < most < 16 + 70
        assert survivor.load.resuming == 0


@virtual
async def test_answers_that_always_differ_at_their_end_end_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bring = Attempt.bring

    def differs(self: Attempt, rows: Rows, now: float) -> bool:
        if rows.ending is not None:
            raise Diverged("for the test")
        return bring(self, rows, now)

    monkeypatch.setattr(Attempt, "bring", differs)

    async with Dispatcher([toy(1), toy(2)]) as dispatcher:
        with pytest.raises(EngineFailed, match="for the test"):
            await dispatcher.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        assert dispatcher.stats().diverged == 2


@virtual
async def test_a_request_ends_alone_with_the_second_replica_that_is_lost_before_it_has_begun() -> None:
    async with Dispatcher([toy(number) for number in range(6)]) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
        while not stream.done:
            if attempt_of(stream) is not None:
                assert stream._cell.output.admitted_at is None
                lose(attempt_of(stream).replica)
            await asyncio.sleep(0)
        with pytest.raises(EngineFailed, match="2 replicas were lost with it"):
            await stream
        assert dispatcher.stats().ready_replicas == 4


@virtual
async def test_a_replica_that_comes_back_with_another_model_is_not_used() -> None:
    engines = [toy(1), toy(2)]
    async with Dispatcher(engines) as dispatcher:
        lose(dispatcher._replicas[1])
        engines[1].config = dataclasses.replace(engines[1].config, model="another")
        with pytest.raises(ConfigError, match="local-1 has fingerprint name-another"):
            await dispatcher.restart("local-1")
        assert [each.state for each in dispatcher.stats().replicas] == ["ready", "lost"]


@virtual
async def test_replicas_that_drain_go_on_after_a_pause() -> None:
    async with Dispatcher([toy(1)]) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        await anext(stream)
        await dispatcher.pause()
        restarting = asyncio.ensure_future(dispatcher.restart())
        await asyncio.sleep(0.1)
        assert not restarting.done()
        dispatcher.resume()
        assert len((await stream).token_ids) == 20
        await restarting


# -- real models ---------------------------------------------------------------------------------------


def chat() -> tuple[list[dict[str, Any]], list[tuple[Any, SamplingParams]]]:
    """Settings of engines that differ, and every kind of request."""
    prompts = [held_out(task, 1)[-1].messages for task in sorted(TASKS)]
    asked = [
        (prompts[number % len(prompts)], SamplingParams(**{"seed": number, "max_tokens": 32, **kind}))
        for number, kind in enumerate(KINDS.values())
    ]
    settings = {"threads": 2, "page_size": 32, "overlap_steps": 0, **THINKS}
    return [{"threads": 1, "page_size": 16, **THINKS}, settings], asked


def diffusion() -> tuple[list[dict[str, Any]], list[tuple[Any, SamplingParams]]]:
    asked = [
        (f"copy: {word}\n", SamplingParams(seed=number, max_tokens=40, ignore_eos=True, **kind))
        for number, kind in enumerate(DIFFUSION.values())
        for word in ("banana", "a longer text to copy")
    ]
    settings = {"model": "tiny-diffusion", "threads": 1}
    return [settings, settings | {"page_size": 32}], asked


@rest(SECONDS)
@pytest.mark.parametrize("rounds", grid([2], [8]))
@pytest.mark.parametrize("kinds", [chat, diffusion])
async def test_every_kind_of_request_to_a_bundled_model_goes_on(kinds: Any, rounds: int) -> None:
    """All at once, and a replica is lost amid them."""
    require("native")
    settings, asked = kinds()
    engines = [Engine(EngineConfig(**each, deterministic=True)) for each in settings]
    async with Dispatcher(engines) as dispatcher:
        wanted = await asyncio.gather(*[dispatcher.generate(*each) for each in asked])
        total, victim = sum(len(result.token_ids) for result in wanted), dispatcher._replicas[0]
        at = seen = 0

        def moved(count: int) -> None:
            nonlocal seen
            before, seen = seen, seen + count
            if before < at <= seen:
                lose(victim)

        for turn in range(rounds):
            at, seen, victim = total * (turn + 1) // (rounds + 2), 0, dispatcher._replicas[turn % 2]
            found = await asyncio.gather(*[read(dispatcher.generate(*each), moved) for each in asked])
            for each, undisturbed in zip(found, wanted, strict=True):
                check_same(each, undisturbed)
            await dispatcher.restart(victim.name)
        assert dispatcher.stats().diverged == 0
        assert dispatcher.stats().resumed > 0  # how many run on the victim at that moment is chance
