"""Forks: a stream that branches is the same request, started from the same ids and the same seed state."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer import Cancelled, InvalidRequest, Rejected, StreamCheckpoint, WrongLoop
from aioinfer.engine import Engine
from aioinfer.outputs import Chunk, Result
from aioinfer.params import SamplingParams
from aioinfer.pooling import Pooling
from aioinfer.stream import Stream
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_restoring import KINDS, THINKS, same
from tests.tiers import SECONDS, grid, rest, scaled
from tests.toys import ToyDevice, ToyTokenizer, toy_generate
from tests.toys.adapters import ToyAdapter, write_toy_adapter

PROMPT = [*range(1, 20)]
LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=7)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
#: what a toy of 64 tokens can be asked for
TOY_KINDS: dict[str, dict[str, Any]] = {
    **{
        name: kind
        for name, kind in KINDS.items()
        if not {"grammar", "bad_words", "logits_processors"} & {*kind}
    },
    "allowed": {"allowed_token_ids": [*range(5, 50)]},
    "stop strings": {"stop": ("q", "zz")},
    "stops kept": {"stop": ("q", "zz"), "include_stop": True},
    "stops of answers": {"stop": ("q",), "stop_format": ("hermes", "qwen3", None)},
    "stop tokens": {"stop_token_ids": [46, 47]},
}


async def read(stream: Stream, count: int) -> list[Chunk]:
    """Chunks until ``count`` tokens were read, or the end."""
    chunks: list[Chunk] = []
    async for chunk in stream:
        chunks.append(chunk)
        if sum(len(each.token_ids) for each in chunks) >= count:
            break
    return chunks


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def whole(stream: Stream) -> tuple[str, list[int], Result]:
    """All that is left of a stream, and its result."""
    chunks = [chunk async for chunk in stream]
    return text_of(chunks), ids_of(chunks), stream.result()


def cut(checkpoint: StreamCheckpoint, at: int, seed: int, then: Sequence[int] = ()) -> StreamCheckpoint:
    """The same of ``at`` tokens, with another seed."""
    params = checkpoint.params
    ids = [*checkpoint.token_ids[:at], *then]
    return replace(
        checkpoint,
        params=params if params.seed is None else params.changed(seed=seed),
        seed=seed,
        token_ids=ids,
        logprobs=checkpoint.logprobs[:at],
        delivered_tokens=0,
        delivered_characters=0,
    )


async def forks_are_restored_requests(
    one: Engine, other: Engine, prompt: Any, params: SamplingParams, dice: random.Random, n: int = 2
) -> int:
    """Fork at every chunk, and compare with the same checkpoint restored elsewhere; returns how many."""
    stream, wanted, found = one.generate(prompt, params), [], []
    await stream.accepted()
    async for chunk in stream:
        if stream.done or chunk.finish_reason is not None:
            break
        known = stream.checkpoint()
        at = dice.randint(0, len(known.token_ids))
        for number, fork in enumerate(stream.fork(n, at=at)):
            wanted.append(other.restore(cut(known, at, known.seed + 1 + number)))
            found.append((fork, at))
    for again, (fork, at) in zip(wanted, found, strict=True):
        text, ids, result = await whole(fork)
        expected = await again
        same(result, expected)
        assert ids == result.token_ids[at:]
        assert result.text.endswith(text)
        assert (result.resumed, result.identical) == (at, True)
    await stream
    return len(found)


@pytest.mark.parametrize("looks_up", [True, False])
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_a_fork_is_the_request_restored_from_the_same_ids(
    make_engine: MakeEngine, window: int, looks_up: bool
) -> None:
    dice, count = random.Random(window), 0
    settings = {"num_pages": 512, "deterministic": True, "tokenizer": lambda: ToyTokenizer(looks_up=looks_up)}
    settings |= THINKS
    async with (
        make_engine(overlap_steps=window, **settings) as one,
        make_engine(page_size=8, overlap_steps=0, prefix_cache=False, **settings) as other,
    ):
        for number, kind in enumerate(TOY_KINDS.values()):
            params = SamplingParams(**{"seed": number, "max_tokens": 24, **kind})
            asked = [dice.randrange(1, 64) for _ in range(dice.randint(1, 9))]
            count += await forks_are_restored_requests(one, other, asked, params, dice)
        assert count > 100
        await settle(one)
        await settle(other)


@rest(SECONDS)
async def test_a_fork_of_a_model_is_the_request_restored_to_the_bit() -> None:
    from tests.engine.test_restoring import two
    from tests.model.harness import require

    require("native")
    dice, count = random.Random(3), 0
    kinds = [
        "drawn",
        "penalised",
        "logprobs",
        "stop strings",
        "stop pattern",
        "bad words",
        "schema",
        "object",
    ]
    async with two("tiny-chat") as (one, other):
        for number, name in enumerate(kinds):
            params = SamplingParams(**{"seed": number, "max_tokens": 20, **KINDS[name]})
            count += await forks_are_restored_requests(one, other, "What comes next?", params, dice)
        assert count > 50


# -- pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 10, 17])
async def test_a_fork_of_a_running_stream_computes_one_token_again(make_engine: MakeEngine, at: int) -> None:
    async with make_engine(page_size=4, num_pages=256) as engine:
        stream = engine.generate(PROMPT, LONG)
        kept = ids_of(await read(stream, 20))[:at]
        before = engine.stats()
        forks = stream.fork(3, at=at)
        results = await asyncio.gather(*forks)
        # One token is always left to compute. What lies behind the last whole page is copied from the parent.
        shared = len(PROMPT) + at - 1
        assert [each.usage.cached_tokens for each in results] == [shared] * 3
        assert engine.stats().cached_tokens - before.cached_tokens == 3 * (shared // 4 * 4)
        for number, result in enumerate(results):
            assert result.token_ids == toy_generate(PROMPT, LONG, seed=8 + number, begun=kept)
        assert (await stream).token_ids == toy_generate(PROMPT, LONG, seed=7)
        await settle(engine)


async def test_a_parent_may_be_closed_right_after(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine:
        stream = engine.generate(PROMPT, GREEDY)
        kept = ids_of(await read(stream, 9))
        (fork,) = stream.fork()
        stream.close()
        assert (await fork).token_ids == toy_generate(PROMPT, GREEDY)
        assert fork.usage.cached_tokens == (len(PROMPT) + len(kept) - 1) // 4 * 4
        with pytest.raises(Cancelled):
            stream.rewind(0)
        await settle(engine)


async def test_a_fork_with_another_salt_shares_nothing(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        await read(stream, 6)
        (fork,) = stream.fork(cache_salt="own")
        assert (await fork).usage.cached_tokens == 0
        assert fork.result().token_ids == toy_generate(PROMPT, GREEDY)


@pytest.mark.parametrize("snapshots", [0, 6])
async def test_forks_of_a_recurrent_model(make_engine: MakeEngine, snapshots: int) -> None:
    device = ToyDevice(snapshots=snapshots, num_pages=128)
    async with make_engine(device=device, num_pages=128, state_snapshot_tokens=1) as engine:
        stream = engine.generate(PROMPT, LONG)
        ids = ids_of(await read(stream, 12))
        for at in (0, 5, len(ids)):
            result = await stream.fork(at=at)[0]
            assert result.token_ids == toy_generate(PROMPT, LONG, seed=8, begun=ids[:at])
        await stream
        await settle(engine)


# -- seeds, parameters, options ------------------------------------------------------------------------


async def test_seeds_follow_the_parent_or_the_parameters(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=256) as engine:
        stream = engine.generate(PROMPT, LONG)
        ids = ids_of(await read(stream, 6))
        await engine.pause()
        by_parent = stream.fork(3)
        by_params = stream.fork(3, params=LONG.changed(seed=100))
        unset = stream.fork(1, params=LONG.changed(seed=None))
        engine.resume()
        for streams, seed in ((by_parent, 8), (by_params, 100), (unset, 8)):
            for number, each in enumerate(streams):
                wanted = toy_generate(PROMPT, LONG, seed=seed + number, begun=ids)
                assert (await each).token_ids == wanted


async def test_the_checkpoint_of_a_fork_is_restored(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        await read(stream, 4)
        (fork,) = stream.fork(then=[3, 4])
        chunks = await read(fork, 8)
        checkpoint = StreamCheckpoint.from_json(fork.checkpoint().to_json())
        fork.close()
        text, ids, result = await whole(engine.restore(checkpoint))
        wanted = toy_generate(PROMPT, LONG, seed=8, begun=checkpoint.token_ids)
        assert result.token_ids == wanted
        assert ids_of(chunks)[:2] == [3, 4]
        assert result.text.endswith(text_of(chunks) + text)
        assert result.token_ids[-len(ids) - len(ids_of(chunks)) :] == [*ids_of(chunks), *ids]


async def test_a_fork_of_a_fork(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=256) as engine:
        stream, begun = engine.generate(PROMPT, LONG), []
        for depth in range(5):
            begun += ids_of(await read(stream, 3))
            (stream,) = stream.fork(then=[depth + 1])
        begun_at = len(begun)
        _, ids, result = await whole(stream)
        assert result.token_ids == toy_generate(PROMPT, LONG, seed=12, begun=[*begun, 5])
        assert ids == result.token_ids[begun_at:]
        await settle(engine)


async def test_what_follows_is_delivered_with_logprobs(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY.changed(logprobs=1))
        chunks = await read(stream, 5)
        (fork,) = stream.fork(then=[3, 4])
        first = await anext(fork)
        assert first.token_ids[:2] == [3, 4]
        assert [(each.token_id, each.logprob, each.top) for each in (first.logprobs or [])[:2]] == [
            (3, 0.0, ()),
            (4, 0.0, ()),
        ]
        result = await fork
        assert [each.token_id for each in result.logprobs or []] == result.token_ids
        assert result.token_ids[: len(ids_of(chunks))] == ids_of(chunks)
        assert (await stream.fork(params=GREEDY)[0]).logprobs is None
        (bare,) = engine.choices(PROMPT, GREEDY, n=1)
        await read(bare, 3)
        with pytest.raises(InvalidRequest, match="logprobs"):
            bare.fork(params=GREEDY.changed(logprobs=0))
        assert (await bare.fork(at=0, params=GREEDY.changed(logprobs=0))[0]).logprobs is not None


async def test_text_follows_as_its_tokens_do(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        ids = ids_of(await read(stream, 5))
        then = ToyTokenizer().encode_part("so")
        (by_text,), (by_ids,) = stream.fork(then="so"), stream.fork(then=then)
        text, read_ids, result = await whole(by_text)
        assert (text, read_ids, result.token_ids) == (*(await whole(by_ids))[:2], (await by_ids).token_ids)
        assert result.token_ids == toy_generate(PROMPT, GREEDY, begun=[*ids, *then])


async def test_adapters(make_engine: MakeEngine, tmp_path: Path) -> None:
    paths = [write_toy_adapter(tmp_path / name, name) for name in ("1", "2")]
    key = ToyAdapter.read(paths[0]).key
    device = ToyDevice(max_adapters=4, num_pages=128)
    async with make_engine(max_adapters=3, num_pages=128, device=device) as engine:
        await engine.load_adapter("a", paths[0])
        stream = engine.generate(PROMPT, GREEDY, adapter="a")
        ids = ids_of(await read(stream, 5))
        forks = [*stream.fork(), *stream.fork(adapter=None)]
        for fork, adapter in zip(forks, (key, 0), strict=True):
            assert (await fork).token_ids == toy_generate(PROMPT, GREEDY, begun=ids, adapter=adapter)
        await engine.pause()
        stream.rewind(3)
        engine.resume()
        await anext(stream)
        await engine.pause()
        await engine.load_adapter("a", paths[1])
        with pytest.raises(InvalidRequest, match="other files"):
            stream.fork()
        stream.rewind(3)  # it is the request that had the adapter
        await engine.unload_adapter("a")
        engine.resume()
        assert (await stream).token_ids == toy_generate(PROMPT, GREEDY, adapter=key)
        with pytest.raises(InvalidRequest, match="not loaded"):
            stream.rewind(3)
        assert (await stream).token_ids == toy_generate(PROMPT, GREEDY, adapter=key)
        await settle(engine)
        engine._core.adapters.audit()
        while engine.stats().adapters_draining:
            await asyncio.sleep(0.001)


async def test_weights_that_are_replaced_meanwhile(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine:
        stream = engine.generate(PROMPT, GREEDY)
        ids = ids_of(await read(stream, 5))
        await engine.pause()
        (early,) = stream.fork()
        assert await engine.update_weights({"weights": 1}) == 1
        (late,) = stream.fork()
        engine.resume()
        for each in (early, late):
            result = await each
            assert result.token_ids == toy_generate(PROMPT, GREEDY, weights=1, begun=ids)
            assert (result.identical, result.weight_version) == (False, 1)
        await stream
        (old,) = stream.fork(at=2)
        chunks = [chunk async for chunk in old]
        assert {each.weight_version for each in chunks} == {1}
        assert old.result().token_ids == toy_generate(PROMPT, GREEDY, weights=1, begun=ids[:2])
        await settle(engine)


async def test_a_rewound_request_does_not_wait_for_the_update_that_waits_for_it(
    make_engine: MakeEngine,
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        await read(stream, 5)
        await engine.pause()
        updating = asyncio.ensure_future(engine.update_weights({"weights": 1}, mode="wait"))
        while not engine._core.holding_back:
            await asyncio.sleep(0.001)
        stream.rewind(2)
        (fork,) = stream.fork(at=2)
        engine.resume()
        assert (await stream).token_ids == toy_generate(PROMPT, GREEDY)
        assert await updating == 1
        begun = stream.result().token_ids[:2]
        assert (await fork).token_ids == toy_generate(PROMPT, GREEDY, weights=1, begun=begun)
        await settle(engine)


# -- logits processors ---------------------------------------------------------------------------------


class Counting:
    """Forces the number of output tokens, modulo 50, at every third one, which it must have seen."""

    def __init__(self, seen: Sequence[int] = ()) -> None:
        self.seen = [*seen]

    def accept(self, token: int) -> None:
        self.seen.append(token)

    def copy(self) -> Counting:
        return Counting(self.seen)

    def __call__(self, ids: Any, logits: Any) -> list[int] | None:
        assert ids.tolist() == [*PROMPT, *self.seen]
        return [len(self.seen) % 50 + 1] if len(self.seen) % 3 == 0 else None


async def test_processors_with_a_state_are_forked_with_it(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine:
        stream = engine.generate(PROMPT, LONG.changed(logits_processors=(Counting(),)))
        await read(stream, 10)
        forks = [*stream.fork(2, at=7, then=[60]), *stream.fork(at=0)]
        results = [await each for each in forks]
        stream.inject([61], at=4)
        results.append(await stream)
        assert [each.token_ids[7] for each in results[:2]] == [60, 60]
        for result in results:
            forced = result.token_ids[::3]
            assert forced == [number % 50 + 1 for number in range(0, 40, 3)]
        await settle(engine)


async def test_a_stream_forks_and_is_rewound_while_its_coroutine_waits(make_engine: MakeEngine) -> None:
    asked: list[tuple[list[int], asyncio.Future[list[int] | None]]] = []

    async def hook(ids: Any, logits: Any) -> list[int] | None:
        answer: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        asked.append((ids.tolist()[len(PROMPT) :], answer))
        return await answer

    async def question(output: list[int]) -> asyncio.Future[list[int] | None]:
        while not (asked and asked[-1][0] == output):
            await asyncio.sleep(0)
        return asked[-1][1]

    async with make_engine(num_pages=128) as engine:
        stream = engine.generate(PROMPT, GREEDY.changed(logits_processors=(hook,), max_tokens=4))
        (await question([])).set_result([5, 6])
        parents = await question([5, 6])
        (fork,) = stream.fork(at=2, then=[7])
        (await question([5, 6, 7])).set_result([8])
        assert (await fork).token_ids == [5, 6, 7, 8]
        stream.rewind(1)
        again = await question([5])
        assert parents.cancelled()
        again.set_result([9, 9])
        other = await question([5, 9, 9])
        stream.inject([10], at=2)
        (await question([5, 9, 10])).set_result([11])
        assert (await stream).token_ids == [5, 9, 10, 11]
        assert other.cancelled()
        await settle(engine)


# -- refusals ------------------------------------------------------------------------------------------


async def test_what_cannot_be_is_refused_by_name_and_nothing_is_queued(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=32) as engine:
        stop = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, stop_token_ids=[50])
        stream = engine.generate(PROMPT, stop)
        ids = ids_of(await read(stream, 4))
        refused: list[tuple[str, dict[str, Any]]] = [
            ("n", {"n": 0}),
            ("n", {"n": 129}),
            ("n", {"n": True}),
            ("at", {"at": -1}),
            ("at", {"at": 10_000}),
            ("at", {"at": 1.0}),
            ("then", {"then": 5}),
            ("then", {"then": [64]}),
            ("then", {"then": [-1]}),
            ("then", {"then": ["a"]}),
            ("then", {"then": [3, 50]}),
            ("then", {"then": "a" * 10_000}),
            ("then", {"then": [1] * 120, "params": stop.changed(max_tokens=None)}),
            ("max_tokens", {"then": [1] * 20}),
            ("max_tokens", {"params": stop.changed(max_tokens=len(ids))}),
            ("max_tokens", {"params": stop.changed(max_tokens=0)}),
            ("stop_token_ids", {"params": stop.changed(stop_token_ids=(ids[1],))}),
            ("params", {"params": {}}),
            ("pooling", {"pooling": Pooling("mean")}),
            ("priority", {"priority": "high"}),
        ]
        for field, given in refused:
            with pytest.raises(InvalidRequest) as caught:
                stream.fork(**{"at": len(ids), **given})
            assert caught.value.field == field, given
        with pytest.raises(TypeError):
            stream.fork(temperature=1)  # type: ignore[call-arg]
        (late,) = stream.fork(then="a" * 30)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await late
        stats = engine.stats()
        assert stats.waiting == stats.arriving == 0
        score = engine.generate(PROMPT, SamplingParams(max_tokens=0))
        with pytest.raises(RuntimeError, match="generates nothing"):
            score.fork()
    async with make_engine(tokenizer=None) as engine:
        stream = engine.generate(PROMPT, GREEDY)
        ids = ids_of(await read(stream, 4))
        with pytest.raises(InvalidRequest, match="then: the model has no tokenizer"):
            stream.fork(then="text")
        assert (await stream.fork(then=[5])[0]).token_ids == toy_generate(PROMPT, GREEDY, begun=[*ids, 5])


async def test_either_all_forks_are_queued_or_none(make_engine: MakeEngine) -> None:
    async with make_engine(max_running_requests=1, max_queued_requests=3) as engine:
        stream = engine.generate(PROMPT, GREEDY)
        await read(stream, 3)
        await engine.pause()
        with pytest.raises(Rejected):
            stream.fork(5)
        assert engine.stats().waiting == 0
        assert len(stream.fork(3)) == 3
        engine.resume()
        assert (await stream).token_ids == toy_generate(PROMPT, GREEDY)


async def test_a_stop_that_follows_is_refused(make_engine: MakeEngine) -> None:
    text = ToyTokenizer().decode([7, 8])
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0, stop=text))
        await stream.accepted()
        await read(stream, 2)
        (fork,) = stream.fork(then=[7, 8])
        with pytest.raises(InvalidRequest) as caught:
            await fork
        assert caught.value.field == "then"


async def test_other_loops_cannot_fork(make_engine: MakeEngine) -> None:
    raised: list[BaseException] = []

    async def elsewhere(stream: Stream) -> None:
        for call in (stream.fork, lambda: stream.rewind(0), lambda: stream.inject([1])):
            try:
                call()
            except WrongLoop as error:
                raised.append(error)

    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        await read(stream, 3)
        thread = threading.Thread(target=lambda: asyncio.run(elsewhere(stream)))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert len(raised) == 3
        (fork,) = stream.fork()
        with pytest.raises(WrongLoop):
            await asyncio.to_thread(lambda: asyncio.run(whole(fork)))
        fork.close()


# -- many ----------------------------------------------------------------------------------------------


async def test_a_task_group_that_fails_ends_all_forks(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=256) as engine:
        stream = engine.generate(PROMPT, LONG)
        await read(stream, 3)
        forks = stream.fork(6)

        async def fails() -> None:
            await anext(forks[0])
            raise ValueError("no branch is good")

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in forks[1:]]
                group.create_task(fails())
        assert caught.value.subgroup(ValueError)
        assert all(task.cancelled() or task.done() for task in tasks)
        assert all(each.done for each in forks[1:])
        forks[0].close()
        stream.close()
        await settle(engine)


@pytest.mark.parametrize("snapshots", [None, 4])
async def test_forks_that_are_cancelled_at_random(make_engine: MakeEngine, snapshots: int | None) -> None:
    dice = random.Random(5)
    device = ToyDevice(snapshots=snapshots, num_pages=96)
    async with make_engine(device=device, num_pages=96, max_running_requests=6) as engine:

        async def live(stream: Stream, begun: list[int], seed: int) -> None:
            """Read a stream, check it, and leave it somewhere, with forks or without."""
            ids = [*begun]
            leaves = dice.randrange(40)
            async for chunk in stream:
                ids += chunk.token_ids
                assert ids == toy_generate(PROMPT, LONG, seed=seed, begun=begun)[: len(ids)]
                if len(ids) - len(begun) > leaves:
                    break
            stream.close()

        total = scaled(5000, 150)
        made = 0
        while made < total:
            seed = dice.randrange(1000)
            stream = engine.generate(PROMPT, LONG.changed(seed=seed))
            ids = ids_of(await read(stream, dice.randint(1, 20)))
            at = dice.randint(0, len(ids))
            then = dice.choices(range(1, 64), k=dice.choice([0, 0, 1, 5]))
            forks = stream.fork(dice.randint(1, 12), at=at, then=then)
            made += len(forks)
            if dice.random() < 0.5:
                stream.close()
            tasks = [
                asyncio.create_task(live(fork, ids[:at], seed + 1 + number))
                if not then
                else asyncio.create_task(whole(fork))
                for number, fork in enumerate(forks)
            ]
            for task in tasks:
                if dice.random() < 0.3:
                    task.cancel()
                if dice.random() < 0.3:
                    await asyncio.sleep(0)
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, (tuple, asyncio.CancelledError)), outcome
            stream.close()
        await settle(engine)
