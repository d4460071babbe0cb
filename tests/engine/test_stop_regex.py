"""Stop patterns through the engine: the same cut in any window, and a bad pattern hurts nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import regex

from aioinfer import errors
from aioinfer.params import SamplingParams
from aioinfer.testing import ToyTokenizer, toy_generate
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle


class Walls(ToyTokenizer):
    """Every token is a run of one letter and a wall: what makes naive patterns explode."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces = ["", *["a" * 300 + "!"] * 63]


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
            with pytest.raises(errors.StepFailed, match="stop_regex"):
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


async def test_strings_and_patterns_are_looked_for_together(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:

        async def ask(**stops: Any) -> str | int | None:
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **stops)
            return (await engine.generate([9, 9], params)).stop_reason

        text = (
            await engine.generate([9, 9], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        ).text
        early, late = text[3:5], regex.escape(text[-5:-2])
        assert await ask(stop=early, stop_regex=late) == early
        assert await ask(stop=text[-5:-2], stop_regex=regex.escape(early)) == regex.escape(early)
