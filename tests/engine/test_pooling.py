"""Requests that only prefill: what is pooled of their prompts is exact under every way to schedule them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from aioinfer import InvalidRequest, Pooling, SamplingParams, StepFailed, TimedOut
from aioinfer.embeddings.embedding import normalized
from aioinfer.parallel import Dispatcher
from aioinfer.pooling import KINDS
from aioinfer.testing import FakeEngine
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.making import make_llm
from tests.toys import ToyTokenizer, toy_generate
from tests.toys.blocks import ScriptedDevice
from tests.toys.pooling import toy_pooled

LAST, MEAN = Pooling("last"), Pooling("mean")
POOLINGS = [Pooling(kind) for kind in KINDS if kind not in ("cls", "classes", "choices")]
POOLINGS.append(Pooling("choices", (3, 4, 9)))


def prompts(seed: int, count: int) -> list[list[int]]:
    """Half of them begin alike."""
    rng = random.Random(seed)
    common = rng.choices(range(1, 64), k=21)
    return [
        [*(common if rng.random() < 0.5 else ()), *rng.choices(range(1, 64), k=rng.randint(1, 40))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_size": 4},
        {"chunk_size": 7, "overlap_steps": 2},
        {"prefix_cache": False},
        {"admission": "fifo", "overlap_steps": 0},
        {"mixed": False, "num_pages": 24},
    ],
    ids=str,
)
async def test_chunks_caches_and_chats_beside_change_nothing(
    make_engine: MakeEngine, settings: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=9, temperature=0)
    async with make_engine(**settings) as engine:
        for _ in range(2):  # the second time with what the first has cached
            chats = [engine.generate(ids, params) for ids in prompts(1, 6)]
            asked = [(ids, POOLINGS[at % 4]) for at, ids in enumerate(prompts(2, 24))]
            streams = [engine.generate(ids, pooling=pooling) for ids, pooling in asked]
            for (ids, pooling), stream in zip(asked, streams, strict=True):
                result = await stream
                assert (result.pooled == toy_pooled(ids, pooling)).all()
                assert (result.token_ids, result.finish_reason) == ([], "length")
            for ids, chat in zip(prompts(1, 6), chats, strict=True):
                assert (await chat).token_ids == toy_generate(ids, params)


async def test_a_mean_reads_no_cache_and_leaves_its_prompt_there(make_engine: MakeEngine) -> None:
    ids = [*range(1, 30)]
    async with make_engine() as engine:
        first, again = await engine.generate(ids, pooling=MEAN), await engine.generate(ids, pooling=MEAN)
        last = await engine.generate(ids, pooling=LAST)
    assert (again.pooled == toy_pooled(ids, MEAN)).all()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 0)
    assert last.usage.cached_tokens == 28
    assert (last.pooled == toy_pooled(ids, LAST)).all()


async def test_a_step_that_fails_ends_its_own_requests_and_no_others(make_engine: MakeEngine) -> None:
    def fault(step: Any) -> None:
        if any(13 in request.prompt_ids for request in step.sequences):
            raise RuntimeError("unlucky")

    async with make_engine(fault=fault, max_running_requests=1) as engine:
        with pytest.raises(StepFailed) as failed:
            await engine.embed([[1, 2], [3, 13], [4]])
        assert failed.value.__notes__ == ["of inputs[1]"]
        assert engine.stats().running == engine.stats().waiting == 0
        found = await engine.embed([[1, 2], [3, 12], [4]], normalize=False)
    assert [each.vector.tolist() for each in found] == [
        toy_pooled(ids, LAST).tolist() for ids in ([1, 2], [3, 12], [4])
    ]


async def test_hidden_states_that_are_not_finite_end_their_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.toys import device as toy

    monkeypatch.setattr(toy, "pool", lambda pooling, states: np.full(3, np.nan))
    async with make_engine() as engine:
        with pytest.raises(StepFailed, match="finite"):
            await engine.embed([1, 2, 3])
        monkeypatch.undo()
        assert (await engine.generate([1, 2, 3], pooling=LAST)).usage.cached_tokens == 0


async def test_a_deadline_and_a_cancellation_withdraw_what_is_left(make_engine: MakeEngine) -> None:
    gate = Gate()
    async with make_engine(fault=gate, max_running_requests=2) as engine:
        with pytest.raises(TimedOut):
            await engine.embed([[index + 1] for index in range(20)], running_timeout=0.01)
        task = asyncio.create_task(engine.embed([[index + 1] for index in range(20)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.release()
        while engine.stats().running + engine.stats().waiting + engine.stats().steps_in_flight:
            await asyncio.sleep(0)
        assert engine.stats().admitted < 20
        assert len(await engine.embed(["a", "b"])) == 2


async def test_progress_counts_the_inputs_and_the_queue_is_never_full(make_engine: MakeEngine) -> None:
    seen: list[tuple[int, int | None]] = []
    async with make_engine(max_running_requests=3, max_queued_requests=2) as engine:
        found = await engine.embed(
            [[index + 1] for index in range(50)], progress=lambda *each: seen.append(each)
        )
    assert len(found) == 50
    assert seen[-1] == (50, 50)
    assert seen == sorted(seen)


async def test_dimensions_are_cut_before_the_length_becomes_one(make_engine: MakeEngine) -> None:
    raw = toy_pooled([5, 6], LAST)
    async with make_engine() as engine:
        cut = await engine.embed([5, 6], dimensions=2)
        tokens = await engine.embed([5, 6], pooling="tokens")
        plain = await engine.embed([5, 6], normalize=False)
    assert np.array_equal(cut.vector, normalized(raw[:2]))
    assert np.linalg.norm(cut.vector) == pytest.approx(1.0)
    assert np.array_equal(plain.vector, raw)
    assert tokens.vector.shape == (2, 3)
    assert np.array_equal(tokens.vector, normalized(toy_pooled([5, 6], Pooling("tokens"))))


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        ("a", {"pooling": "max"}, "pooling"),
        ("a", {"dimensions": 4}, "dimensions"),
        ("a", {"normalize": "yes"}, "normalize"),
        ("a", {"prompt_name": "query"}, "prompt_name"),
        ("a", {"prompt_name": []}, "prompt_name"),
        ("", {}, "inputs"),
        (5, {}, "inputs"),
        (None, {}, "inputs"),
        (b"ab", {}, "inputs"),
        (["a", 3], {}, "inputs[1]"),
        ([[1], [64]], {}, "inputs[1]"),
        (["a" * 300], {}, "inputs[0]"),
    ],
)
async def test_what_is_wrong_is_named(
    make_engine: MakeEngine, inputs: Any, options: dict[str, Any], field: str
) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.embed(inputs, **options)
    assert refused.value.field == field


async def test_an_engine_without_hidden_states_refuses_by_name(make_engine: MakeEngine) -> None:
    device = ScriptedDevice()
    async with make_engine(device=device, tokenizer=None, page_size=device.page_size) as engine:
        with pytest.raises(InvalidRequest, match="gives no hidden states") as refused:
            await engine.embed([1, 2])
    assert refused.value.field == "model"


async def test_a_scripted_engine_embeds_without_a_script() -> None:
    async with FakeEngine([]) as engine:
        one, same, other = await engine.embed(["a text", "a text", "another"])
    assert one.vector.tolist() == same.vector.tolist() != other.vector.tolist()


async def test_threads_and_dispatchers_embed_as_the_engine_does(make_engine: MakeEngine) -> None:
    inputs = prompts(4, 30)
    wanted = [toy_pooled(ids, MEAN).tolist() for ids in inputs]
    options: dict[str, Any] = {"pooling": "mean", "normalize": False}
    async with make_engine() as engine:
        elsewhere = engine.threadsafe()
        found = await asyncio.to_thread(lambda: elsewhere.embed(inputs, **options).result())
        assert [each.vector.tolist() for each in found] == wanted
        scores = await asyncio.to_thread(lambda: elsewhere.score("a", ["a"], method="cosine").result())
        assert scores.scores == [pytest.approx(1.0)]
    async with Dispatcher([make_engine(), make_engine()]) as dispatcher:
        found = await dispatcher.embed(inputs, **options)
        assert [each.vector.tolist() for each in found] == wanted
        assert all(each.stats.admitted for each in dispatcher.stats().replicas if each.stats)


def test_the_synchronous_engine_embeds_and_scores() -> None:
    with make_llm() as llm:
        found = llm.embed(prompts(6, 20), normalize=False)
        one = llm.embed("hello")
        assert llm.score("a", ["b", "a"], method="cosine").scores[1] == pytest.approx(1.0)
        with pytest.raises(InvalidRequest) as refused:
            llm.embed(["a", ""])
        with pytest.raises(InvalidRequest) as document:
            llm.score("a", ["b", "c" * 999], method="cosine")
    assert [each.vector.tolist() for each in found] == [
        toy_pooled(ids, LAST).tolist() for ids in prompts(6, 20)
    ]
    assert np.array_equal(one.vector, normalized(toy_pooled(ToyTokenizer().encode("hello"), LAST)))
    assert (refused.value.field, document.value.field) == ("inputs[1]", "documents[1]")


async def test_a_prompt_is_scored_from_where_it_is_wanted_and_the_rest_is_cached(
    make_engine: MakeEngine,
) -> None:
    ids = [*range(1, 40)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    async with make_engine() as engine:
        whole = await engine.generate(ids, params)
        assert whole.usage.cached_tokens == 0
        for start in (0, 1, 2, 17, 38, 39, 1000):
            result = await engine.generate(ids, params.changed(logprob_start_len=start))
            assert whole.prompt_logprobs is not None
            without = min(max(1, start), len(ids))
            assert result.prompt_logprobs == [None] * without + whole.prompt_logprobs[without:]
            most = max(0, min(start - 1, len(ids) - 1))
            assert result.usage.cached_tokens == most // 4 * 4
            assert (result.token_ids, result.finish_reason) == ([], "length")


@pytest.mark.parametrize("priority", ["decode", "prefill"])
async def test_beside_tokens_prompts_without_an_output_take_one_chunk_of_a_step(
    make_engine: MakeEngine, priority: str
) -> None:
    seen: list[tuple[bool, int]] = []

    def watch(step: Any) -> None:
        lengths = [row.length for row in step.prefilling if row.sequence.pooled is not None]
        seen.append((bool(step.num_generating), sum(lengths)))

    async with make_engine(fault=watch, chunk_size=16, step_priority=priority, num_pages=512) as engine:
        await engine.embed([[index + 1] * 30 for index in range(8)])
        assert max(tokens for _, tokens in seen) > 16
        seen.clear()
        chat = engine.generate([1, 2], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
        await anext(aiter(chat))
        found = await engine.embed([[index + 20] * 30 for index in range(8)], normalize=False)
        await chat
    assert 0 < max(tokens for beside, tokens in seen if beside) <= 16
    assert [each.vector.tolist() for each in found] == [
        toy_pooled([index + 20] * 30, LAST).tolist() for index in range(8)
    ]


async def test_a_step_of_prompts_alone_samples_nothing(make_engine: MakeEngine) -> None:
    seen: list[bool] = []

    def watch(step: Any) -> None:
        seen.extend(row.samples for row in step.rows)

    async with make_engine(fault=watch, launch_mode="inline") as engine:
        await engine.embed([[1, 2, 3], [4, 5]])
    assert seen
    assert not any(seen)


@pytest.mark.parametrize(
    "ignored",
    [{"max_tokens": 50}, {"stop": ("x",)}, {"logprobs": 2}, {"min_tokens": 1}, {"temperature": 0.5}],
    ids=lambda ignored: next(iter(ignored)),
)
async def test_parameters_that_pooling_would_ignore_are_refused(
    make_engine: MakeEngine, ignored: dict[str, Any]
) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest) as refused:
            engine.generate([1, 2, 3], SamplingParams(**ignored), pooling=MEAN)
        assert refused.value.field == next(iter(ignored))
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=1)
        result = await engine.generate([1, 2, 3], scored, pooling=MEAN)
        assert result.pooled is not None
        assert len(result.prompt_logprobs or ()) == 3


async def test_a_chat_without_an_answer_is_refused(make_engine: MakeEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with make_engine() as engine:
        for options, field in (
            ({"pooling": MEAN}, "pooling"),
            ({"params": SamplingParams(max_tokens=0)}, "max_tokens"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                engine.chat(messages, **options)
            assert refused.value.field == field


async def test_threads_may_change_what_they_gave_at_once(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        elsewhere, wanted = engine.threadsafe(), await engine.embed([[3, 4], [5, 6]])
        scored = (await engine.score(["a", "b"], ["a", "c"], method="cosine")).scores
        inputs, queries, documents = [[3, 4], [5, 6]], ["a", "b"], ["a", "c"]
        embedding = elsewhere.embed(inputs)
        scoring = elsewhere.score(queries, documents, method="cosine")
        inputs[0][0] = 9
        for each in (inputs, queries, documents):
            each.pop()
        documents.append("d")
        queries.append("d")
        found = await asyncio.wrap_future(embedding)
        assert [each.vector.tolist() for each in found] == [each.vector.tolist() for each in wanted]
        assert (await asyncio.wrap_future(scoring)).scores == scored
        with pytest.raises(InvalidRequest) as refused:
            elsewhere.embed([[1], [2.5]])  # type: ignore[list-item]
        assert refused.value.field == "inputs[1]"
