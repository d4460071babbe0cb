"""What a caller gives is copied and checked before the call returns: changing it later changes nothing."""

from __future__ import annotations

import array
import asyncio
import copy
import pickle
import random
import re
import sys
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aioinfer import errors
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from tests.engine.asking import KeepingTokenizer
from tests.engine.conftest import MakeEngine
from tests.engine.making import make_llm
from tests.sequences import sequence_of
from tests.toys import ToyTokenizer, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Rendering(ToyTokenizer):
    """Its chat template reads everything that a caller can give."""

    def encode_chat(self, messages: Any, **template_kwargs: Any) -> list[int]:
        return self.encode(repr((messages, sorted(template_kwargs.items()))))


def everywhere(value: Any, change: Callable[[Any], None]) -> None:
    """Apply a change to every list and mapping within."""
    if isinstance(value, (list, tuple)):
        for item in list(value):
            everywhere(item, change)
    elif isinstance(value, dict):
        for item in list(value.values()):
            everywhere(item, change)
    if isinstance(value, (list, dict)):
        change(value)


def items(value: Any, new: Any) -> None:
    for key in value if isinstance(value, dict) else range(len(value)):
        value[key] = new


CHANGES: dict[str, Callable[[Any], None]] = {
    "clear": lambda value: value.clear(),
    "grow": lambda value: value.update(more=1) if isinstance(value, dict) else value.extend([8] * 2000),
    "huge": lambda value: items(value, 10**9),
    "text": lambda value: items(value, "x"),
    "none": lambda value: items(value, None),
    "self": lambda value: items(value, value),
}

IDS = list(range(1, 30))


def chat() -> Any:
    return [
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "tags": {"a": [1, 2]}},
        {"role": "assistant", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]


def options() -> Any:
    return {"tools": [{"function": {"parameters": {"type": "object"}}}], "flag": True}


def given_params() -> dict[str, Any]:
    return {
        "stop": ["zzz", "yyy"],
        "stop_token_ids": [61, 62],
        "logit_bias": {5: 1.0, 6: -1.0},
        "allowed_token_ids": list(range(60)),
        "bad_words": [[7, 8], [9, 10]],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
    }


@pytest.mark.parametrize("change", CHANGES)
async def test_a_prompt_changed_after_the_call_changes_nothing(make_engine: MakeEngine, change: str) -> None:
    async with make_engine(tokenizer=Rendering, num_pages=256) as engine:
        wanted = [
            (await engine.generate(IDS, SHORT)).token_ids,
            (await engine.generate(chat(), SHORT, chat_template_kwargs=options())).token_ids,
        ]
        ids, messages, kwargs = list(IDS), chat(), options()
        streams = [
            engine.generate(ids, SHORT),
            engine.generate(messages, SHORT, chat_template_kwargs=kwargs),
        ]
        for value in (ids, messages, kwargs):
            everywhere(value, CHANGES[change])
        assert [(await stream).token_ids for stream in streams] == wanted
        assert (await streams[0]).prompt_token_ids == IDS


def test_parameters_hold_nothing_that_can_be_changed() -> None:
    params = SamplingParams(
        **given_params(), grammar=Grammar("choice", '["a"]'), diffusion=DiffusionParams(steps=3)
    )
    for name in SamplingParams.__dataclass_fields__:
        assert not isinstance(getattr(params, name), (list, set, bytearray)), name
    assert params.logit_bias is not None
    for call in (
        lambda bias: bias.update({1: 2.0}),
        lambda bias: bias.clear(),
        lambda bias: bias.pop(5),
        lambda bias: bias.__setitem__(5, 1e30),
        lambda bias: bias.__delitem__(5),
        lambda bias: bias.setdefault(50, 1.0),
        lambda bias: bias.__ior__({1: 2.0}),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            call(params.logit_bias)
    assert pickle.loads(pickle.dumps(params)) == params == replace(params)
    assert hash(params) == hash(replace(params))


async def test_a_result_can_be_changed_by_its_reader(make_engine: MakeEngine) -> None:
    """The lists of a result are not those of the request, which may still run."""
    async with make_engine() as engine:
        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        await engine.pause()
        stream = engine.generate([1, 2, 3], long)
        early: Any = stream.result().prompt_token_ids
        early[:] = [10**9] * 50
        engine.resume()
        first = await anext(stream)
        for value in (stream.result().prompt_token_ids, stream.result().token_ids, first.token_ids):
            assert isinstance(value, list)
            value[:] = [10**9] * 50
        assert (await stream).token_ids == toy_generate([1, 2, 3], long)


async def test_another_thread_that_changes_the_arguments_cannot_break_the_engine(
    make_engine: MakeEngine,
) -> None:
    """Every call either refuses what it saw or answers one state of it; the engine goes on."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    ids, messages, bias = [5] * 40, chat(), {5: 1.0}
    stopping = threading.Event()

    def change() -> None:
        while not stopping.is_set():
            ids[:] = rng.choice([[5] * 40, [], [10**9], ["x"] * 3, [7] * 3000])
            messages[:] = rng.choice([[], chat(), [chat()[0], 5], [5]])
            bias.clear()
            bias.update(rng.choice([{}, {5: 1.0}, {"x": 1.0}, {10**9: 1.0}]))

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads alternate at any place
    async with make_engine(tokenizer=Rendering, num_pages=256) as engine:
        thread.start()
        answered = refused = 0
        try:
            for number in range(5000):
                if number > 300 and answered and refused:
                    break
                for prompt in (ids, messages):
                    try:
                        params = replace(SHORT, logit_bias=bias) if number % 2 else SHORT
                        result = await engine.generate(prompt, params)
                    except errors.InvalidRequest:
                        refused += 1
                    else:
                        assert len(result.token_ids) == 6, seed
                        answered += 1
        finally:
            stopping.set()
            thread.join()
            sys.setswitchinterval(interval)
        assert answered, seed
        assert refused, seed
        assert (await engine.generate([1, 2, 3], SHORT)).token_ids == toy_generate([1, 2, 3], SHORT)


@pytest.mark.parametrize(
    "prompt",
    [
        (5, 6, 7),
        array.array("i", [5, 6, 7]),
        array.array("Q", [5, 6, 7]),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint8),
    ],
)
async def test_arrays_of_ids_are_prompts(make_engine: MakeEngine, prompt: Any) -> None:
    async with make_engine() as engine:
        prompt = copy.copy(prompt)
        stream = engine.generate(prompt, SHORT)
        if not isinstance(prompt, tuple):
            prompt[1] = 9
        result = await stream
        assert result.token_ids == toy_generate([5, 6, 7], SHORT)
        assert set(map(type, result.prompt_token_ids)) == {int}


@pytest.mark.parametrize(
    "prompt",
    [
        {5, 6},
        {"role": "user", "content": "x"},
        b"abc",
        range(3),
        iter([5, 6]),
        np.array([5.0, 6.0]),
        np.array([[5, 6]]),
        np.array(5),
        np.array([True, False]),
        np.array([], np.int64),
        np.array(["a"]),
        [np.int64(5)],
        [5, True],
        [5, None],
        [5, [6]],
        [5, 2**70],
        [5, -(2**70)],
        ["a", "b"],
        [{"role": "user", "content": object()}],
    ],
    ids=lambda prompt: re.sub(r" at 0x\w+", "", repr(prompt)),
)
async def test_what_is_no_prompt_is_refused_by_name(make_engine: MakeEngine, prompt: Any) -> None:
    async with make_engine() as engine:
        with pytest.raises(errors.InvalidRequest) as caught:
            await engine.generate(prompt, SHORT)
        assert caught.value.field.startswith(("prompt", "messages"))
        assert len(str(caught.value)) < 300
        assert engine.stats().admitted == 0


async def test_messages_may_be_any_mappings_and_variables_of_the_template_functions(
    make_engine: MakeEngine,
) -> None:
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "changed"

    tokenizer = KeepingTokenizer()
    async with make_engine(tokenizer=lambda: tokenizer) as engine:
        messages: Any = [UserDict(role=Text("user"), content=UserDict(a=[Text("x")]))]
        await engine.generate(messages, SHORT, chat_template_kwargs={"tools": [test_parameters_hold_nothing]})
        assert tokenizer.seen == [
            (
                [{"role": "user", "content": {"a": ["x"]}}],
                {"tools": [test_parameters_hold_nothing]},
            )
        ]
        deep: Any = test_parameters_hold_nothing
        for _ in range(300):
            deep = [deep]
        with pytest.raises(errors.InvalidRequest, match="nested too deeply"):
            engine.generate([{"role": "user", "content": deep}])
        for kwargs in ({"a": object()}, {"messages": []}, {"self": 1}, {5: 1}, [("a", 1)]):
            with pytest.raises(errors.InvalidRequest, match="chat_template_kwargs"):
                engine.generate([{"role": "user", "content": "x"}], chat_template_kwargs=kwargs)


def test_parameters_hold_nothing() -> None:
    """Named by the test above, as a tool."""


# -- length -----------------------------------------------------------------------------------------


class Counting(ToyTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(len(text))
        return super().encode(text)


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 1021,
        "é" * 600,
        " " * (1 << 24),
        [1] * 256,
        [1] * 10**6,
        (1,) * 256,
        np.ones(10**6, np.int64),
        [{"role": "user", "content": "x"}] * 256,
        [{"role": "user", "content": "x" * (1 << 21)}],
        [{"role": "user", "content": [{"type": "text", "text": "x" * (1 << 20)}] * 2}],
    ],
    ids=lambda prompt: f"{type(prompt).__name__}-{len(prompt)}",
)
async def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(
    make_engine: MakeEngine, prompt: Any
) -> None:
    tokenizer = Counting()
    async with make_engine(tokenizer=lambda: tokenizer) as engine:
        with pytest.raises(errors.InvalidRequest, match="maximum context length is 256 tokens") as caught:
            engine.generate(prompt)
        assert (caught.value.field, caught.value.code) == ("prompt", "context_length_exceeded")
        assert engine._started()._intake.waiting == 0
        assert tokenizer.encoded == []


async def test_what_may_fit_is_tokenized_and_then_refused(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate("x" * 256)
        with pytest.raises(errors.InvalidRequest, match="has 256 tokens") as caught:
            await stream
        assert caught.value.code == "context_length_exceeded"
        assert (await engine.generate("x" * 255, SHORT)).usage.prompt_tokens == 255


async def test_parameters_are_refused_before_the_prompt_is_tokenized(make_engine: MakeEngine) -> None:
    tokenizer = Counting()
    async with make_engine(tokenizer=lambda: tokenizer) as engine:
        for params in (
            SamplingParams(allowed_token_ids=[64]),
            SamplingParams(logit_bias={64: 1}),
            SamplingParams(bad_words=[[1, 64]]),
            SamplingParams(diffusion=DiffusionParams()),
        ):
            with pytest.raises(errors.InvalidRequest):
                engine.generate("text", params)
        await asyncio.sleep(0)
        assert tokenizer.encoded == []


# -- defaults of the model --------------------------------------------------------------------------

RECOMMENDED = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("given", "temperature", "top_p", "top_k", "min_p"),
    [
        ({}, 0.6, 0.95, 20, 0.0),
        ({"max_tokens": 7}, 0.6, 0.95, 20, 0.0),
        ({"temperature": 1.0}, 1.0, 0.95, 20, 0.0),
        ({"temperature": 1}, 1, 0.95, 20, 0.0),
        ({"temperature": 0, "top_k": 0}, 0, 0.95, 0, 0.0),
        ({"top_p": 1.0, "min_p": 0.1}, 0.6, 1.0, 20, 0.1),
    ],
)
def test_fields_that_are_not_set_are_those_of_the_model(
    given: dict[str, Any], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(**given)
    for same in (
        params,
        replace(params),
        pickle.loads(pickle.dumps(params)),
        replace(SamplingParams(seed=5), **given, seed=None),
    ):
        made = same.inherit(RECOMMENDED)
        assert (made.temperature, made.top_p, made.top_k, made.min_p) == (temperature, top_p, top_k, min_p)
        assert made.max_tokens == given.get("max_tokens")
        assert made.inherit(SamplingParams(temperature=2.0, top_p=0.1)).temperature == temperature
    assert params == SamplingParams(**given), "inheriting changes nothing in place"
    assert SamplingParams() == SamplingParams(temperature=1.0)
    assert SamplingParams().inherit(SamplingParams()) == SamplingParams()


async def test_engine_and_llm_use_the_defaults_of_the_model(make_engine: MakeEngine, tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": false, "top_k": 3}')
    wanted = toy_generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=7))
    async with make_engine(model=str(tmp_path)) as engine:
        assert (await engine.generate([1, 2, 3], SamplingParams(max_tokens=7))).token_ids == wanted
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=7, temperature=1.0))
        assert sequence_of(stream).params.temperature == 1.0
        assert sequence_of(stream).params.top_k == 3
    with make_llm(model=str(tmp_path)) as llm:
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=7), progress=False)[0].token_ids == wanted
