"""Stop patterns through the engine: the same cut in any window, and a bad pattern affects no other output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import regex

from aioinfer import errors
from aioinfer.engine import Engine
from aioinfer.loop import driver
from aioinfer.loop.core import Core
from aioinfer.loop.texts import Texts
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.text.stop_regex import StopRegex
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.text.letters import Letters
from tests.toys import ToyTokenizer, toy_generate


class Walls(ToyTokenizer):
    """Every token is a run of one letter and a wall: what makes naive patterns explode."""

    def __init__(self) -> None:
        super().__init__(looks_up=False)
        self._pieces = ["", *["a" * 300 + "!"] * 63]


class Dotted(ToyTokenizer):
    """Every token has text."""

    def __init__(self) -> None:
        super().__init__(looks_up=False)
        self._pieces[0] = "."


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("include", [False, True])
async def test_a_match_ends_the_output_and_streams_consistently(
    make_engine: MakeEngine, window: int, include: bool
) -> None:
    pattern = "[aeiou][a-z]?[xyz]"
    async with make_engine(overlap_steps=window) as engine:
        stopped = 0
        for seed in range(12):
            free = SamplingParams(seed=seed, max_tokens=40, ignore_eos=True)
            params = SamplingParams(
                seed=seed, max_tokens=40, ignore_eos=True, stop_regex=pattern, include_stop=include
            )
            ids = toy_generate([seed, 2], free, seed=seed)
            seen, count = "", 0
            for token in ids:
                seen, count = seen + ToyTokenizer().decode([token]), count + 1
                if (match := regex.search(pattern, seen)) is not None:
                    break
            async with engine.generate([seed, 2], params) as stream:
                text = ""
                async for chunk in stream:
                    text += chunk.text
            result = stream.result()
            assert text == result.text
            assert result.token_ids == ids[:count]
            if match is None:
                assert (result.finish_reason, result.stop_reason, text) == ("length", None, seen)
                continue
            stopped += 1
            assert (result.finish_reason, result.stop_reason) == ("stop", pattern)
            assert text == seen[: match.end() if include else match.start()]
        assert stopped > 5
        await settle(engine)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){20}b"])
async def test_a_catastrophic_pattern_is_one_clean_error(make_engine: MakeEngine, pattern: str) -> None:
    async with make_engine(tokenizer=Walls) as engine:
        free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        async with engine.generate([1, 2, 3], free) as beside:
            await anext(beside)
            text = ""
            with pytest.raises(errors.InvalidRequest, match="stop_regex"):
                async for chunk in engine.generate([4], SamplingParams(stop_regex=pattern, ignore_eos=True)):
                    text += chunk.text
            result = await beside
        assert result.token_ids == toy_generate([1, 2, 3], free)
        assert result.text == Walls().decode(result.token_ids)
        assert Walls().decode([1] * 5).startswith(text)
        await settle(engine)
        assert (await engine.generate([1, 2, 3], free)).text == result.text


async def test_patterns_need_text(make_engine: MakeEngine) -> None:
    async with make_engine(tokenizer=None) as engine:
        with pytest.raises(errors.InvalidRequest, match="stop_regex"):
            engine.generate([1], SamplingParams(stop_regex="ab"))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[list[StopRegex]]:
    """The matchers that searched, by turn of the loop in which they did."""
    turns: list[list[StopRegex]] = []

    def counted(call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            turns.append([])
            return call(*arguments)

        return run

    push = StopRegex.push

    def recorded(self: StopRegex, text: str) -> Any:
        turns[-1].append(self)
        return push(self, text)

    monkeypatch.setattr(Core, "resolve", counted(Core.resolve))
    monkeypatch.setattr(Core, "catch_up", counted(Core.catch_up))
    monkeypatch.setattr(StopRegex, "push", recorded)
    return turns


PATTERNS = ["[aeiou][a-z]?[xyz]", "q+[a-z]*t", "[b-d]{3}", "zzzz"]


async def ask_many(engine: Engine) -> list[Result]:
    """Outputs of all lengths, some of them streamed, of which the texts must be those of the results."""

    async def read(number: int) -> Result:
        params = SamplingParams(
            seed=number,
            max_tokens=3 + number,
            logprobs=2,
            stop_regex=PATTERNS[number % 4],
            include_stop=number % 3 == 0,
        )
        async with engine.generate([number, 2], params) as stream:
            chunks = [chunk async for chunk in stream]
            result = await stream
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
        assert len(result.logprobs or ()) == len(result.token_ids)
        assert result.metrics is not None
        assert len(result.metrics.token_times) == len(result.token_ids)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(number)) for number in range(40)]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("window", [0, 2])
async def test_outputs_do_not_depend_on_how_long_a_turn_may_search(
    make_engine: MakeEngine, window: int, monkeypatch: pytest.MonkeyPatch, searches: list[list[StopRegex]]
) -> None:
    settings = {"overlap_steps": window, "max_running_requests": 40, "num_pages": 1024}
    outputs = {}
    for seconds, most in ((0.0, 2), (3600.0, 80)):
        monkeypatch.setattr(driver, "_SEARCHING", seconds)
        searches.clear()
        async with make_engine(**settings) as engine:
            outputs[seconds] = await ask_many(engine)
            await settle(engine)
        # One token, and what the detokenizer held back at the end of an output.
        assert max(map(len, searches)) <= most
    assert outputs[0.0] == outputs[3600.0]
    assert {result.finish_reason for result in outputs[0.0]} == {"stop", "length"}


async def test_requests_that_are_behind_take_turns(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, searches: list[list[StopRegex]]
) -> None:
    catch_up = Texts.catch_up
    monkeypatch.setattr(driver, "_SEARCHING", 0.0)
    monkeypatch.setattr(Texts, "catch_up", lambda *given: [])
    async with make_engine(tokenizer=Dotted) as engine:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop_regex="zzzz")
        streams = [engine.generate([number], params) for number in range(8)]
        await settle(engine)
        monkeypatch.setattr(Texts, "catch_up", catch_up)
        await asyncio.gather(*(asyncio.ensure_future(stream._wait_result()) for stream in streams))
    order = [id(matcher) for turn in searches for matcher in turn]
    assert order == 5 * order[:8]
    assert len(set(order)) == 8


@pytest.mark.parametrize("end", ["close", "timeout", "engine", "drain"])
async def test_a_request_that_is_behind_can_end_in_any_way(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its tokens are computed, its text is not: nothing of it remains, and nothing is delivered twice."""
    held = True
    catch_up = Texts.catch_up
    monkeypatch.setattr(Texts, "catch_up", lambda *given: [] if held else catch_up(*given))
    free = toy_generate([1], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    engine = make_engine()
    await engine.start()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_regex="zzzz")
    timeout = 0.3 if end == "timeout" else None
    streams = [engine.generate([1], params, running_timeout=timeout) for _ in range(3)]
    await settle(engine)
    for partial in [stream.result() for stream in streams if not stream.done]:
        assert partial.finish_reason == "abort"
        assert partial.token_ids == free[: len(partial.token_ids)]
        assert partial.text == ToyTokenizer().decode(partial.token_ids)
    if end == "close":
        for stream in streams:
            stream.close()
        assert all(stream.done for stream in streams)
        held = False
    elif end == "timeout":
        with pytest.raises(errors.TimedOut):
            await asyncio.gather(*streams)
    elif end == "engine":
        await engine.aclose()
        with pytest.raises(errors.EngineClosed):
            await asyncio.gather(*streams)
    else:
        closing = asyncio.ensure_future(engine.aclose(drain=True))
        await asyncio.sleep(0)
        held = False
        await closing
        assert [stream.result().token_ids for stream in streams] == [free] * 3
    await engine.aclose()


async def test_a_stop_that_the_end_of_the_output_completes_is_its_reason(make_engine: MakeEngine) -> None:
    class Cs(Letters):
        def push(self, token_id: int) -> str:
            return "c"

    class Late(ToyTokenizer):
        """The end of the text is known at the end of the output only."""

        def detokenizer(self, prompt_ids: Any, *, skip_special_tokens: bool) -> Any:
            return Cs(tail="end")

    async def ask(engine: Engine, **stops: Any) -> Result:
        return await engine.generate([1], SamplingParams(max_tokens=4, ignore_eos=True, **stops))

    async with make_engine(tokenizer=Late) as engine:
        for field, stop in (("stop", "nd"), ("stop_regex", "n[d]")):
            result = await ask(engine, **{field: [stop]})
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
            assert (result.text, len(result.token_ids)) == ("cccce", 4)


async def test_more_stops_than_configured_are_refused_by_name(make_engine: MakeEngine) -> None:
    limits = {"max_stop_strings": 2, "max_stop_characters": 9, "max_stop_patterns": 0}
    async with make_engine(**limits) as engine:
        await engine.generate([1], SamplingParams(max_tokens=1, stop=["abcd", "abcde"]))
        for field, stops in (
            ("stop", {"stop": ["a", "b", "c"]}),
            ("stop", {"stop": ["abcde", "fghij"]}),
            ("stop_regex", {"stop_regex": ["a"]}),
        ):
            with pytest.raises(errors.InvalidRequest, match=f"{field}.*max_stop") as refused:
                engine.generate([1], SamplingParams(**stops))
            assert refused.value.field == field
