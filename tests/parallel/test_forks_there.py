"""Forks, rewinds and injections of a dispatcher's streams: its replicas go on from checkpoints."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioinfer import InvalidRequest, SamplingParams
from aioinfer.parallel import Dispatcher
from tests.engine.test_forks import ids_of, read, text_of, whole
from tests.parallel.toys import STEP, attempt_of, prompt, record, toys, virtual
from tests.toys import ToyTokenizer, toy_generate

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=7)
PROMPT = prompt(1)


async def settled(dispatcher: Dispatcher) -> None:
    await asyncio.sleep(3 * STEP)
    stats = dispatcher.stats()
    assert all(each.stats.running == each.stats.waiting == 0 for each in stats.replicas if each.stats)
    running = dispatcher._started()
    assert (len(running.open), len(running.attempts), len(running.queue)) == (0, 0, 0)


@virtual
async def test_forks_have_the_parents_tokens_and_seeds_of_their_own() -> None:
    async with Dispatcher(toys(2)) as dispatcher:
        stream = dispatcher.generate(PROMPT, LONG)
        chunks = await read(stream, 6)
        ids = ids_of(chunks)
        forks = [*stream.fork(3), *stream.fork(then=[5, 6]), *stream.fork(then="so", at=2)]
        so = ToyTokenizer().encode_part("so")
        wanted = [(ids, [], 8), (ids, [], 9), (ids, [], 10), (ids, [5, 6], 8), (ids[:2], so, 8)]
        for fork, (kept, then, seed) in zip(forks, wanted, strict=True):
            text, more, result = await whole(fork)
            assert result.token_ids == toy_generate(PROMPT, LONG, seed=seed, begun=[*kept, *then])
            assert more == result.token_ids[len(kept) :]
            assert result.text == ToyTokenizer().decode(kept) + text
        assert (await stream).token_ids == toy_generate(PROMPT, LONG, seed=7)
        assert text_of(chunks) == ToyTokenizer().decode(ids)
        for bad, given in (("then", {"then": [99]}), ("at", {"at": 1000}), ("n", {"n": 0})):
            with pytest.raises(InvalidRequest) as caught:
                stream.fork(**given)  # type: ignore[arg-type]
            assert caught.value.field == bad
        await settled(dispatcher)


@virtual
async def test_rewinds_and_injections() -> None:
    async with Dispatcher(toys(2, num_pages=64)) as dispatcher:
        dice = random.Random(2)

        async def live(seed: int) -> None:
            params, asked = LONG.changed(seed=seed), prompt(seed)
            stream, chunks = dispatcher.generate(asked, params), list[Any]()
            begun: list[int] = []
            for _ in range(dice.randint(0, 4)):
                async for chunk in stream:
                    chunks.append(chunk)
                    if dice.random() < 0.2:
                        break
                chunks = chunks[: dice.randint(0, len(chunks) - 1)]
                ids = ids_of(chunks)
                if dice.random() < 0.5 or len(ids) > 35:
                    stream.rewind(len(ids))
                    begun = begun[: len(ids)]
                else:
                    begun = [*ids, dice.randrange(1, 64)]
                    stream.inject(begun[-1:], at=len(ids))
                await stream.accepted()
            chunks += [chunk async for chunk in stream]
            result = stream.result()
            assert ids_of(chunks) == result.token_ids == toy_generate(asked, params, seed=seed, begun=begun)
            assert text_of(chunks) == result.text == ToyTokenizer().decode(result.token_ids)

        for batch in range(4):
            await asyncio.gather(*(live(20 * batch + each) for each in range(12)))
        assert dispatcher._started().diverged == 0
        await settled(dispatcher)


@virtual
async def test_forks_and_rewound_streams_outlive_a_replica() -> None:
    async with Dispatcher(toys(2)) as dispatcher:
        stream = dispatcher.generate(PROMPT, LONG)
        ids = ids_of(await read(stream, 6))
        (fork,) = stream.fork(then=[3])
        await fork.accepted()
        await read(fork, 4)
        stream.rewind(2)
        await stream.accepted()
        await anext(stream)
        attempt_of(fork).replica.engine.lose()
        assert (await fork).token_ids == toy_generate(PROMPT, LONG, seed=8, begun=[*ids, 3])
        assert (await stream).token_ids == toy_generate(PROMPT, LONG, seed=7)
        assert dispatcher._started().resumed >= 1


@virtual
async def test_a_stream_that_waits_is_rewritten_in_its_place() -> None:
    async with Dispatcher(toys(1, max_running_requests=1)) as dispatcher:
        streams = [dispatcher.generate(prompt(each), LONG.changed(max_tokens=5)) for each in range(4)]
        await asyncio.sleep(2 * STEP)
        place = record(streams[2]).place
        streams[2].inject([9])
        await streams[2].accepted()
        assert record(streams[2]).place[:2] == place
        ends = [await each for each in streams]
        assert ends[2].token_ids[0] == 9
        times = [each.metrics.finished for each in ends if each.metrics is not None]
        assert times == sorted(times)  # type: ignore[type-var]
        await settled(dispatcher)
