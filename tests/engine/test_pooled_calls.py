"""Calls for many inputs: scores by one version of the weights, room for others in the queue, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioinfer import InvalidRequest, Pooling, SamplingParams, StepFailed
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.embeddings.embedding import normalized
from aioinfer.parallel import Dispatcher
from aioinfer.stream import Stream
from tests.engine.conftest import Gate, MakeEngine
from tests.parallel.toys import Toy, virtual
from tests.toys import ToyTokenizer
from tests.toys.adapters import ToyAdapter, write_toy_adapter
from tests.toys.pooling import toy_pooled

LAST = Pooling("last")
DOCUMENTS = [f"document {index}" for index in range(24)]


def cosines(query: str, documents: list[str], **model: int) -> list[float]:
    first, *others = (
        normalized(toy_pooled(ToyTokenizer().encode(text), LAST, **model)) for text in (query, *documents)
    )
    return [float(first @ other) for other in others]


def weights(version: int) -> dict[str, int]:
    return {"weights": version}


@virtual
async def test_scores_are_by_one_version_of_the_weights() -> None:
    async with Toy(max_running_requests=1) as engine:
        updates: list[asyncio.Task[int]] = []

        def progress(done: int, total: int | None) -> None:
            if done == 5:
                updates.append(asyncio.create_task(engine.update_weights(weights(1))))

        found = await engine.score("query", DOCUMENTS, method="cosine", progress=progress)
        assert [await each for each in updates] == [1]
        assert found.weight_version == 1
        assert found.scores == pytest.approx(cosines("query", DOCUMENTS, weights=1))
        # What had the new weights already was not computed again.
        assert len(DOCUMENTS) + 1 + 5 <= engine.stats().admitted < 2 * len(DOCUMENTS)


@virtual
async def test_weights_that_are_replaced_on_and_on_fail_the_call() -> None:
    async with Toy(max_running_requests=1) as engine:

        async def update() -> None:
            for version in range(1, 10_000):
                await engine.update_weights(weights(version))

        updating = asyncio.create_task(update())
        with pytest.raises(StepFailed, match="again and again"):
            await engine.score("query", DOCUMENTS, method="cosine")
        updating.cancel()
        await asyncio.wait([updating])


@virtual
async def test_scores_are_by_one_version_of_an_adapter(tmp_path: Path) -> None:
    one, other = (write_toy_adapter(tmp_path / name, name) for name in ("one", "other"))
    async with Toy(max_running_requests=1) as engine:
        await engine.load_adapter("a", one)
        loads: list[asyncio.Task[Any]] = []

        def progress(done: int, total: int | None) -> None:
            if done == 5:
                loads.append(asyncio.create_task(engine.load_adapter("a", other)))

        found = await engine.score("query", DOCUMENTS, method="cosine", adapter="a", progress=progress)
        await asyncio.gather(*loads)
    key = ToyAdapter.read(other).key
    assert found.scores == pytest.approx(cosines("query", DOCUMENTS, adapter=key))


@virtual
async def test_each_embedding_tells_its_weights() -> None:
    async with Toy(max_running_requests=1) as engine:

        def progress(done: int, total: int | None) -> None:
            if done == 5:
                updates.append(asyncio.create_task(engine.update_weights(weights(7), version=7)))

        updates: list[asyncio.Task[int]] = []
        found = await engine.embed(DOCUMENTS, normalize=False, progress=progress)
        await asyncio.gather(*updates)
    assert {each.weight_version for each in found} == {0, 7}
    for text, each in zip(DOCUMENTS, found, strict=True):
        wanted = toy_pooled(ToyTokenizer().encode(text), LAST, weights=each.weight_version)
        assert each.vector.tolist() == wanted.tolist()


@virtual
async def test_replicas_with_other_weights_do_not_score_together() -> None:
    replicas = [Toy(max_running_requests=2), Toy(max_running_requests=2)]
    async with Dispatcher(replicas, policy="round_robin") as dispatcher:
        await replicas[1].update_weights(weights(1))
        found = await dispatcher.score("query", DOCUMENTS, method="cosine")
    assert found.weight_version == 1
    assert found.scores == pytest.approx(cosines("query", DOCUMENTS, weights=1))


@pytest.mark.parametrize(
    ("settings", "most"),
    [({"max_queued_requests": 8}, 2), ({"max_queued_requests": 1}, 1), ({"max_queued_tokens": 120}, 3)],
    ids=str,
)
async def test_a_call_leaves_most_of_the_queue_to_others(
    make_engine: MakeEngine, settings: dict[str, int], most: int
) -> None:
    inputs = [[index + 1] * 10 for index in range(40)]
    waiting: list[int] = []
    chats: list[Stream] = []

    def progress(done: int, total: int | None) -> None:
        waiting.append(engine.stats().waiting - sum(not (each.admitted or each.done) for each in chats))
        if done >= 10 and not chats:
            chats.extend(engine.generate([1, 2], SamplingParams(max_tokens=2)) for _ in range(most - 1))

    async with make_engine(max_running_requests=2, prefix_cache=False, **settings) as engine:
        recorder = engine.measuring.recorder
        found = await engine.embed(inputs, normalize=False, progress=progress)
        await asyncio.gather(*chats)
        assert recorder is not None
        assert recorder.rejections == 0
    assert max(waiting) == most
    assert [each.vector.tolist() for each in found] == [toy_pooled(ids, LAST).tolist() for ids in inputs]


async def test_a_call_waits_for_room_in_a_queue_that_others_have_filled(make_engine: MakeEngine) -> None:
    gate = Gate()
    async with make_engine(fault=gate, max_running_requests=1, max_queued_requests=1) as engine:
        first = engine.generate([1, 2])
        await asyncio.to_thread(gate.arrived.acquire)
        second = engine.generate([1, 2])
        calling = asyncio.ensure_future(engine.embed([[1], [2]]))
        await asyncio.sleep(0)
        assert not calling.done()
        gate.release()
        assert len((await asyncio.gather(first, second, calling))[-1]) == 2


@pytest.mark.parametrize("bad", [[64], "", [], "a" * 5000, 3])
async def test_a_bad_input_at_the_end_is_found_before_others_are_computed(
    make_engine: MakeEngine, bad: Any
) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.embed([*([index % 60 + 1] for index in range(50)), bad])
        assert refused.value.field == "inputs[50]"
        assert engine.stats().admitted == engine.stats().waiting == 0


async def test_other_tasks_have_turns_while_inputs_are_checked(make_engine: MakeEngine) -> None:
    turns, loop = 0, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    async with make_engine() as engine:
        loop.call_soon(turn)
        with pytest.raises(InvalidRequest):
            await engine.embed([*([1] * 100 for _ in range(400)), [64]])
    assert turns >= 10


# -- how long an input may be ---------------------------------------------------------------------------

SHORT = Sentences(stated=True, embeds=True, normalize=False, max_tokens=8)


class Around(ToyTokenizer):
    """Puts a token in front of texts, and another one behind."""

    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text), 2]

    def encode_part(self, text: str) -> list[int]:
        return super().encode(text)


async def test_an_input_longer_than_the_model_was_made_for_is_refused_or_cut(make_engine: MakeEngine) -> None:
    ids = [*range(10, 22)]
    async with make_engine() as engine:
        engine.sentences = SHORT
        for inputs in (ids, "a text of many", [ids[:8], ids]):
            with pytest.raises(InvalidRequest, match="made for 8") as refused:
                await engine.embed(inputs)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequest, match="made for 8") as refused:
            await engine.score("a", ["b", "a text of many"], method="cosine")
        assert refused.value.field == "documents[1]"
        elsewhere = engine.threadsafe()
        with pytest.raises(InvalidRequest, match="made for 8"):
            await asyncio.to_thread(elsewhere.embed, ids)
        thread = await asyncio.wrap_future(elsewhere.embed([ids], truncate_prompt_tokens=5))
        assert thread[0].vector.tolist() == toy_pooled(ids[:5], LAST).tolist()
        for most, kept in ((5, 5), (8, 8), (20, 8), (-1, 8)):
            found = await engine.embed([ids, ids[:3]], truncate_prompt_tokens=most)
            wanted = [toy_pooled(each, LAST).tolist() for each in (ids[:kept], ids[:3])]
            assert [each.vector.tolist() for each in found] == wanted
        wrongs: list[Any] = [0, -2, 2.5, "5"]
        for wrong in wrongs:
            with pytest.raises(InvalidRequest) as refused:
                await engine.embed(ids, truncate_prompt_tokens=wrong)
            assert refused.value.field == "truncate_prompt_tokens"


async def test_special_tokens_stay_around_a_text_that_is_cut(make_engine: MakeEngine) -> None:
    async with make_engine(tokenizer=Around) as engine:
        engine.sentences = SHORT
        part = ToyTokenizer().encode("a text of many")
        found = await engine.embed("a text of many", truncate_prompt_tokens=6)
        assert list(found.prompt_token_ids) == [1, *part[:4], 2]
        short = await engine.embed("abc", truncate_prompt_tokens=6)
        assert list(short.prompt_token_ids) == [1, *ToyTokenizer().encode("abc"), 2]


async def test_inputs_of_any_length_are_cut_to_what_the_model_takes(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        most = engine.info.max_model_len
        found = await engine.embed(["ab" * 10_000, [3] * 10_000], truncate_prompt_tokens=-1)
        ids = ToyTokenizer().encode("ab" * most)[:most]
        assert [list(each.prompt_token_ids) for each in found] == [ids, [3] * most]


async def test_a_prompt_without_an_output_may_fill_the_context(make_engine: MakeEngine) -> None:
    async with make_engine(max_model_len=64) as engine, Dispatcher([make_engine()]) as dispatcher:
        for each in (engine, dispatcher):
            ids = [index % 60 + 1 for index in range(each.info.max_model_len)]
            assert (await each.embed(ids, normalize=False)).vector.tolist() == toy_pooled(ids, LAST).tolist()
            scored = await each.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
            assert len(scored.prompt_logprobs or ()) == len(ids)
            with pytest.raises(InvalidRequest) as refused:
                await each.generate(ids, SamplingParams(max_tokens=1))
            assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
            with pytest.raises(InvalidRequest, match="maximum context length"):
                await each.embed([*ids, 1])
