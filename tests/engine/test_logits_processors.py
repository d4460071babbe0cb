"""Logits processors: what a program decides at each position holds in every way in which a step can go."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from aioinfer import Cancelled, EngineConfig, InvalidRequest, ProcessorFailed, SamplingParams, errors
from aioinfer.engine import Engine
from aioinfer.params import Grammar
from tests.engine.asking import SCHEMA, bundled_requests
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_transparency import retract_every
from tests.tiers import INTERPRETER, SECONDS, grid, nightly, rest
from tests.toys import ToyDevice, toy_generate

PROMPT = [5, 6, 7, 8, 9]


def nothing(ids: Any, logits: Any) -> None:
    """Change nothing."""


async def nothing_later(ids: Any, logits: Any) -> None:
    """Change nothing, some turns of the loop later."""
    for _ in range(3):
        await asyncio.sleep(0)


def next_one(ids: Any, logits: Any) -> None:
    """Prefer the token behind the likeliest one, by what is before it."""
    logits[(int(logits.argmax()) + int(ids[-1])) % len(logits)] = 2.0


async def next_one_later(ids: Any, logits: Any) -> None:
    await asyncio.sleep(0)
    next_one(ids, logits)


class Counting:
    """Every third token of the output is 33, and two more come with every seventh: by its own count."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def accept(self, token: int) -> None:
        self.count += 1

    def copy(self) -> Counting:
        return Counting(self.count)

    def __call__(self, ids: Any, logits: Any) -> Sequence[int] | None:
        if self.count % 7 == 6:
            return [40, 41, 42]
        if self.count % 3 == 2:
            logits[33] = 9.0
        return None


class CountingLater(Counting):
    def copy(self) -> CountingLater:
        return CountingLater(self.count)

    async def __call__(self, ids: Any, logits: Any) -> Sequence[int] | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__call__(ids, logits)


class Batched:
    """``next_one`` for all rows of a step at once."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, ids: Any, logits: Any) -> None:
        next_one(ids, logits)

    def batch(self, ids: list[Any], logits: list[Any]) -> list[None]:
        self.most = max(self.most, len(ids))
        for each in zip(ids, logits, strict=True):
            next_one(*each)
        return [None] * len(ids)


def wanted(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What the toy model writes under the processors, one token at a time in the plainest way."""
    processors = [each.copy() if hasattr(each, "copy") else each for each in params.logits_processors]
    plain: dict[Any, Any] = {nothing_later: nothing, next_one_later: next_one}
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        one = params.changed(max_tokens=len(output) + 1, logits_processors=())
        token = toy_generate(prompt, one, begun=output)[-1]
        logits = np.zeros(64, np.float32)
        logits[token] = 1.0
        forced = None
        for each in processors:
            call = (
                functools.partial(Counting.__call__, each)
                if isinstance(each, Counting)
                else plain.get(each, each)
            )
            forced = call(np.asarray([*prompt, *output]), logits)
            if forced:
                break
        new = [*forced] if forced else [int(logits.argmax())]
        for token in new[: params.max_tokens - len(output)]:
            output.append(token)
            for each in processors:
                if hasattr(each, "accept"):
                    each.accept(token)
            if token == 0 and not params.ignore_eos:
                return output
    return output


def asked(*processors: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logits_processors": processors, **fields}
    )


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("mode", ["thread", "inline"])
@pytest.mark.parametrize(
    "processors",
    [
        *((nothing,), (nothing_later,), (next_one,), (next_one_later,), (Counting(),), (CountingLater(),)),
        *((nothing, nothing_later, next_one), (Batched(),), (Counting(), next_one_later)),
    ],
)
async def test_outputs_are_what_the_processors_say(
    make_engine: MakeEngine, window: int, mode: str, processors: tuple[Any, ...]
) -> None:
    async with make_engine(overlap_steps=window, launch_mode=mode, chunk_size=3) as engine:
        retract_every(engine, 5)
        params = [asked(*processors), asked(), asked(*processors, logprobs=0), asked(next_one)]
        results = await asyncio.gather(*[engine.generate(PROMPT, each) for each in params])
        await settle(engine)
    for each, result in zip(params, results, strict=True):
        assert result.token_ids == wanted(each)
        assert result.metrics is not None
        assert len(result.metrics.token_times) == len(result.token_ids)
    logprobs = results[2].logprobs
    assert logprobs is not None
    assert [each.token_id for each in logprobs] == results[2].token_ids


async def test_tokens_that_a_grammar_forces_are_decided_as_others(make_engine: MakeEngine) -> None:
    seen: list[int] = []
    bound = Grammar("regex", f"[d-h]{'vwxyz' * 4}")
    async with make_engine() as engine:
        params = asked(lambda ids, logits: seen.append(len(ids)), grammar=bound, ignore_eos=False)
        result = await engine.generate(PROMPT, params)
    assert result.text[1:] == "vwxyz" * 4
    assert seen == [len(PROMPT) + at for at in range(len(result.token_ids))]


@pytest.mark.parametrize("processor", [nothing, next_one, Counting()])
async def test_drafts_are_verified_behind_the_processors(make_engine: MakeEngine, processor: Any) -> None:
    params = asked(processor, max_tokens=40)
    expected = wanted(params)
    async with make_engine(speculation="lookup", adaptive_drafts=False, overlap_steps=1) as engine:
        result = await engine.generate(PROMPT, params.changed(prediction=tuple(expected)))
        stats = engine.stats()
        await settle(engine)
    assert result.token_ids == expected
    assert stats.drafted_tokens > 0
    assert stats.accepted_tokens > 0


async def test_a_coroutine_keeps_no_other_row_waiting(make_engine: MakeEngine) -> None:
    answered = asyncio.Event()

    async def waiting(ids: Any, logits: Any) -> None:
        await answered.wait()

    async with make_engine() as engine:
        late = engine.generate(PROMPT, asked(waiting))
        other = await engine.generate(PROMPT, asked())
        assert other.token_ids == wanted(asked())
        assert late.usage.completion_tokens == 0
        answered.set()
        assert (await late).token_ids == wanted(asked())
        await settle(engine)


@pytest.mark.parametrize("window", [0, 2])
async def test_no_row_is_computed_behind_one_that_waits(make_engine: MakeEngine, window: int) -> None:
    async def write(ids: Any, logits: Any) -> list[int]:
        return [7]

    async with make_engine(overlap_steps=window) as engine:
        result = await engine.generate(PROMPT, asked(write))
        stats = engine.stats()
        before = stats.steps
        await engine.generate(PROMPT[::-1], asked(nothing_later))
        stats = engine.stats()
    assert result.token_ids == [7] * 24
    assert before == 24
    assert stats.steps == 24 + 2 * 24


async def test_a_row_that_waits_a_moment_keeps_its_slot_and_one_that_waits_long_does_not(
    make_engine: MakeEngine,
) -> None:
    begun, answered = asyncio.Event(), asyncio.Event()

    async def waiting(ids: Any, logits: Any) -> None:
        begun.set()
        await answered.wait()

    async with make_engine(max_running_requests=1) as engine:
        quick = engine.generate(PROMPT, asked(nothing_later))
        others = [engine.generate(PROMPT[1:], asked()) for _ in range(3)]
        await asyncio.gather(quick, *others)
        assert engine.stats().retractions == 0
        slow = engine.generate(PROMPT, asked(waiting))
        await begun.wait()
        await engine.generate(PROMPT[1:], asked())
        assert engine.stats().retractions == 1
        answered.set()
        assert (await slow).token_ids == wanted(asked())


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_answer_to_logits_of_earlier_weights_is_not_used(make_engine: MakeEngine, when: str) -> None:
    begun, answered = asyncio.Event(), asyncio.Event()

    async def waiting(ids: Any, logits: Any) -> None:
        begun.set()
        await answered.wait()

    async with make_engine() as engine:
        stream = engine.generate(PROMPT, asked(waiting))
        await begun.wait()
        await engine.pause()
        if when == "before":
            await engine.update_weights({"weights": 1})
        answered.set()
        for _ in range(5):
            await asyncio.sleep(0)
        if when == "after":
            await engine.update_weights({"weights": 1})
        engine.resume()
        assert (await stream).token_ids == toy_generate(PROMPT, asked(), weights=1)


async def test_a_prompt_is_scored_again_before_an_answer_ends_its_output(make_engine: MakeEngine) -> None:
    begun, answered = asyncio.Event(), asyncio.Event()

    async def waiting(ids: Any, logits: Any) -> list[int]:
        begun.set()
        await answered.wait()
        return [9]

    async with make_engine() as engine:
        stream = engine.generate(PROMPT, asked(waiting, max_tokens=1, prompt_logprobs=0))
        await begun.wait()
        await engine.update_weights({"weights": 1})
        answered.set()
        result = await stream
    assert result.token_ids == [9]
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(PROMPT)


async def test_a_coroutine_runs_in_the_context_of_its_caller(make_engine: MakeEngine) -> None:
    who = contextvars.ContextVar("who", default="nobody")
    seen: set[str] = set()

    async def look(ids: Any, logits: Any) -> None:
        await asyncio.sleep(0)
        seen.add(who.get())

    async with make_engine() as engine:
        who.set("caller")
        stream = engine.generate(PROMPT, asked(look))
        who.set("somebody else")
        await stream
    assert seen == {"caller"}


def broken(error: BaseException, ids: Any, logits: Any) -> Any:
    raise error


async def broken_later(error: BaseException, ids: Any, logits: Any) -> Any:
    await asyncio.sleep(0)
    raise error


def spoiling(value: float, ids: Any, logits: Any) -> None:
    logits[:] = value


async def spoiling_later(value: float, ids: Any, logits: Any) -> None:
    logits[:] = value


BROKEN: dict[str, Callable[..., Any]] = {
    "raises": functools.partial(broken, KeyError("a bug")),
    "raises later": functools.partial(broken_later, KeyError("a bug")),
    "cancels": functools.partial(broken_later, asyncio.CancelledError()),
    "not a number": functools.partial(spoiling, float("nan")),
    "infinite": functools.partial(spoiling, float("inf")),
    "nothing left": functools.partial(spoiling, float("-inf")),
    "nothing left later": functools.partial(spoiling_later, float("-inf")),
    "no token": lambda ids, logits: [64],
    "negative": lambda ids, logits: [-1],
    "text": lambda ids, logits: "no",
    "a number": lambda ids, logits: 5,
    "a coroutine": lambda ids, logits: nothing_later(ids, logits).close() or object(),
    "writes ids": lambda ids, logits: ids.__setitem__(0, 1),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_what_a_processor_raises_ends_its_own_request(make_engine: MakeEngine, what: str) -> None:
    async with make_engine() as engine:
        bad = engine.generate(PROMPT, asked(BROKEN[what], max_tokens=8))
        good = await engine.generate(PROMPT, asked())
        with pytest.raises(ProcessorFailed) as caught:
            await bad
        assert good.token_ids == wanted(asked())
        assert caught.value.__cause__ is not None
        if "raises" in what:
            assert isinstance(caught.value.__cause__, KeyError)
            assert caught.value.__cause__.__traceback__ is not None
        await settle(engine)
        again = await engine.generate(PROMPT, asked())
        assert again.token_ids == good.token_ids


async def test_leaving_a_stream_ends_what_its_coroutine_does(make_engine: MakeEngine) -> None:
    left: list[str] = []
    begun = asyncio.Event()

    async def waiting(ids: Any, logits: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.append("cancelled")

    async with make_engine() as engine:
        stream = engine.generate(PROMPT, asked(waiting))
        await begun.wait()
        stream.close()
        await settle(engine)
        begun.clear()
        stream = engine.generate(PROMPT, asked(waiting))
        await begun.wait()
        await engine.aclose()
    assert left == ["cancelled", "cancelled"]
    with pytest.raises(errors.EngineClosed):
        await stream


@pytest.mark.parametrize("how", ["close", "fail", "inject", "go on"])
async def test_a_coroutine_may_end_or_rewrite_its_own_stream(make_engine: MakeEngine, how: str) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    calls = 0

    async def once(ids: Any, logits: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != 4:
            return
        if how == "inject":
            stream.inject([5], at=1)
            return
        stream.close()
        if how == "fail":
            raise ValueError("of no concern")
        if how == "go on":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async with make_engine() as engine:
        params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0, logits_processors=[once])
        stream = engine.generate(PROMPT, params)
        if how == "inject":
            assert (await stream).token_ids[1] == 5
        else:
            with pytest.raises(Cancelled):
                await stream
        await settle(engine)
    gc.collect()
    assert not told


async def test_forced_tokens_that_end_an_output_are_searched_for_stop_patterns(
    make_engine: MakeEngine,
) -> None:
    async def force(ids: Any, logits: Any) -> list[int]:
        await asyncio.sleep(0)
        return [5, 6, 7, 8]

    async with make_engine() as engine:
        params = asked(force).changed(max_tokens=18, stop_regex=("z+q",))
        assert (await engine.generate(PROMPT, params)).token_ids == [*[5, 6, 7, 8] * 4, 5, 6]
        assert (await engine.generate(PROMPT, params.changed(stop_regex=("[g]",)))).finish_reason == "stop"
        await settle(engine)


async def test_slow_processors_go_to_a_thread_and_come_back(make_engine: MakeEngine) -> None:
    where: list[str] = []

    def counted(ids: Any, logits: Any) -> None:
        where.append(threading.current_thread().name.split("_")[0])
        next_one(ids, logits)

    device = ToyDevice()
    device.masks.patience = 0.0  # in a step it is slow, and elsewhere quick
    async with make_engine(device=device) as engine:
        result = await engine.generate(PROMPT, asked(counted))
    assert result.token_ids == wanted(asked(next_one))
    assert where[:2] == ["aioinfer-launch", "aioinfer-text-grammar"]
    assert "aioinfer-launch" in where[2:], where


def test_what_are_no_processors_is_refused() -> None:
    for value in (nothing, 5, "text", [nothing, 5], [None], [nothing] * 17, {nothing}):
        with pytest.raises(InvalidRequest, match="logits_processors"):
            SamplingParams(logits_processors=value)  # type: ignore[arg-type]


async def test_they_are_not_written_into_checkpoints(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, asked(next_one, max_tokens=None))
        async for _ in stream:
            break
        checkpoint = stream.checkpoint()
        with pytest.raises(InvalidRequest, match="logits_processors"):
            checkpoint.to_json()
        stream.close()
        whole = await engine.restore(checkpoint, request_id="again")
    assert whole.token_ids == wanted(asked(next_one, max_tokens=len(whole.token_ids)))


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
@pytest.mark.parametrize("backend", ["native", "torch"])
async def test_a_processor_that_does_nothing_changes_nothing(
    window: int, backend: Any, alone: list[Any]
) -> None:
    config = EngineConfig(
        dtype="float32", overlap_steps=window, sampling_backend=backend, chunk_size=5, threads=1
    )
    async with Engine(config) as engine:
        for processors in ([nothing], [nothing_later], [nothing, nothing_later]):
            streams = [
                engine.generate(prompt, params.changed(logits_processors=tuple(processors)))
                for prompt, params in bundled_requests()
            ]
            found = [(await stream).token_ids for stream in streams]
            assert found == [each.token_ids for each in alone]


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
@pytest.mark.parametrize("later", [False, True])
async def test_a_grammar_holds_whatever_processors_do(window: int, later: bool) -> None:
    def against(ids: Any, logits: Any) -> None:
        logits[:] = 0.0  # the lowest allowed token is the likeliest then
        logits[7] = 50.0

    async def against_later(ids: Any, logits: Any) -> None:
        against(ids, logits)

    plain = SamplingParams(temperature=0, max_tokens=60, grammar=SCHEMA, repetition_penalty=1.1)
    async with Engine(EngineConfig(dtype="float32", overlap_steps=window, threads=1)) as engine:
        prompt = [{"role": "user", "content": "Answer in JSON."}]
        without = await engine.generate(prompt, plain)
        params = plain.changed(logits_processors=(nothing_later if later else nothing,))
        same = await engine.generate(prompt, params)
        assert same.token_ids == without.token_ids
        assert engine.tokenizer is not None
        begin = engine.tokenizer.encode_part(without.text)[:4]
        count = len((same.usage and await engine.tokenize(prompt)) or [])

        def first(ids: Any, logits: Any) -> Any:
            return begin if len(ids) == count else None

        async def first_later(ids: Any, logits: Any) -> Any:
            return first(ids, logits)

        forced = plain.changed(logits_processors=(first_later if later else first,))
        assert (await engine.generate(prompt, forced)).token_ids[:4] == begin
        bent = plain.changed(logits_processors=(against_later if later else against,))
        result = await engine.generate(prompt, bent)
        assert result.text.lstrip().startswith("{")


@rest(SECONDS)
async def test_a_processor_against_a_grammar_fails_by_both_names() -> None:
    def only(ids: Any, logits: Any) -> None:
        logits[:7], logits[8:] = float("-inf"), float("-inf")

    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        stream = engine.generate("Answer: ", SamplingParams(grammar=SCHEMA, logits_processors=[only]))
        with pytest.raises(errors.ConstraintFailed, match="grammar, logits_processors"):
            await stream
        await settle(engine)


@pytest.mark.parametrize("later", [False, True])
async def test_tokens_that_are_returned_pass_no_mask(later: bool) -> None:
    forced: list[int] = []

    def force(ids: Any, logits: Any) -> list[int]:
        return forced

    async def force_later(ids: Any, logits: Any) -> list[int]:
        return forced

    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        assert engine.tokenizer is not None
        end = min(engine.tokenizer.eos_token_ids)
        params = SamplingParams(grammar=SCHEMA, logits_processors=[force_later if later else force])
        forced[:] = [end]
        result = await engine.generate("Answer: ", params)
        assert (result.token_ids, result.finish_reason) == ([end], "stop")
        forced[:] = engine.tokenizer.encode_part("no JSON")
        with pytest.raises(errors.ConstraintFailed):
            await engine.generate("Answer: ", params)
        allowed = params.changed(grammar=None, allowed_token_ids=[end], max_tokens=len(forced))
        assert (await engine.generate("Answer: ", allowed)).token_ids == forced
        await settle(engine)


@nightly(INTERPRETER)
async def test_they_change_the_rows_of_triton_kernels(checkpoint: Callable[[str], Any]) -> None:
    path, _ = checkpoint("qwen3")
    params = [
        asked(*processors, max_tokens=4, temperature=0.7, seed=3, top_k=9, repetition_penalty=1.2)
        for processors in ((), (nothing,), (nothing_later,), (lambda ids, logits: [1, 2],))
    ]
    found = []
    for backend in ("torch", "triton"):
        config = EngineConfig(
            model=str(path), dtype="float32", sampling_backend=backend, num_pages=32, threads=1
        )
        async with Engine(config) as engine:
            found.append([(await engine.generate(PROMPT, each)).token_ids for each in params])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == found[0][2]
    assert found[0][3] == [1, 2, 1, 2]
