"""Every bad argument is refused before it is queued, by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.params import Grammar, SamplingParams
from aioinfer.testing import FakeEngine
from tests.engine.conftest import MakeEngine
from tests.toys import ToyTokenizer


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        (None, {}, "prompt"),
        (5, {}, "prompt"),
        ([1, 2, 64], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1], {"params": {"temperature": 0}}, "params"),
        ([1], {"params": SamplingParams(stop_token_ids=[64])}, "stop_token_ids"),
        ([1], {"waiting_timeout": 0}, "waiting_timeout"),
        ([1], {"running_timeout": float("nan")}, "running_timeout"),
        ([1], {"running_timeout": "soon"}, "running_timeout"),
        ([1], {"max_lag": 0}, "max_lag"),
        ([1], {"priority": 2**31}, "priority"),
        ([1], {"queue_behind": -1}, "queue_behind"),
        ([1], {"queue_behind": 1.0}, "queue_behind"),
        ([1], {"params": SamplingParams(logprob_start_len=1)}, "logprob_start_len"),
        ([1], {"cache_salt": "x" * 257}, "cache_salt"),
        ([1], {"routing_key": 5}, "routing_key"),
        ([1], {"chat_template_kwargs": {}}, "chat_template_kwargs"),
    ],
)
async def test_bad_arguments_never_reach_the_queue(
    make_engine: MakeEngine, prompt: Any, options: dict[str, Any], field: str
) -> None:
    async with make_engine() as engine:
        with pytest.raises(errors.InvalidRequest) as caught:
            engine.generate(prompt, **options)
        assert caught.value.field == field
        assert engine.stats().waiting == engine.stats().admitted == 0


async def test_what_only_tokenizing_can_tell_is_raised_by_the_stream(make_engine: MakeEngine) -> None:
    class Tokenizer(ToyTokenizer):
        def encode_chat(self, messages: Any, **kwargs: Any) -> list[int]:
            raise errors.InvalidRequest("messages", "the model has no chat template")

        def encode(self, text: str) -> list[int]:
            if text == "bug":
                raise ZeroDivisionError
            return super().encode(text)

    async with make_engine(tokenizer=Tokenizer) as engine:
        for prompt, field in ((["m"], None), ("x" * 300, "prompt"), ("bug", "prompt")):
            if field is None:
                prompt, field = [{"role": "user", "content": "x"}], "messages"
            for read in (_iterate, _await):
                with pytest.raises(errors.InvalidRequest) as caught:
                    await read(engine.generate(prompt))
                assert caught.value.field == field
        assert engine.stats().admitted == 0


BRACKETS = "[" * 5000 + "]" * 5000
READ_AS = {
    Grammar("json_schema", BRACKETS): "is nested too deeply",
    Grammar("choice", BRACKETS): "is nested too deeply",
    Grammar("lark", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000): "is nested too deeply",
    Grammar("lark", " "): "is empty",
    Grammar("json_schema", "{"): "is not JSON: Expecting",
    Grammar("json_schema", "3"): "must be an object",
    Grammar("answer", "start: ("): "",
}


@pytest.mark.parametrize(("grammar", "told"), READ_AS.items())
async def test_grammars_that_are_none_are_refused_in_words(grammar: Grammar, told: str) -> None:
    async with FakeEngine("x") as engine:
        with pytest.raises(errors.InvalidRequest, match=f"^grammar: {told}") as caught:
            await engine.generate("a", SamplingParams(grammar=grammar))
        assert not re.search("recursion|a answer", str(caught.value))


async def test_the_longest_prompt_that_fits_is_served(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        result = await engine.generate([1] * 255, SamplingParams(max_tokens=50, ignore_eos=True))
        assert result.finish_reason == "length"
        assert len(result.token_ids) == 1


async def _iterate(stream: Any) -> None:
    async for _ in stream:
        pass


async def _await(stream: Any) -> None:
    await stream
