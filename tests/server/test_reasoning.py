"""Reasoning through the real openai client."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from aioinfer.params import SamplingParams
from aioinfer.text.harmony import TAGS
from aioinfer.text.reasoning import REASONING_PARSERS
from tests.server.chats import TOOLS, Answer, add_tags, both
from tests.server.conftest import Bundled, Serving
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyTokenizer, toy_generate

#: tags that close nothing
STRAY = re.compile(r"\n(?:</think>\n+)+")


class ThinkingTokenizer(ToyTokenizer):
    """A tokenizer with tokens for the tags."""

    def __init__(self, special: bool) -> None:
        super().__init__(looks_up=False)
        self._special = frozenset(range(4, 12)) if special else frozenset()
        for token in range(4, 12):
            self._pieces[token] = "\n</think>\n"
        if special:
            self.added_tokens = {"</think>": 4}
            self.special_tokens = frozenset({"</think>"})

    def encode_chat(self, messages: Any, /, **template_kwargs: Any) -> list[int]:
        # The prompt does not end with a tag.
        return [*super().encode_chat(messages, **template_kwargs), 21]

    def detokenizer(self, prompt_ids: Any, *, skip_special_tokens: bool) -> Any:
        made = super().detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            made._pieces = ["" if at in self._special else each for at, each in enumerate(self._pieces)]
        return made


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [None, *REASONING_PARSERS])
async def test_reasoning_is_split_off(serving: Serving, name: str | None, special: bool) -> None:
    tokenizer = ThinkingTokenizer(special)
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=60)
    ids = toy_generate(tokenizer.encode_chat(messages), params)
    text = tokenizer.decode(ids)
    assert "</think>" in text
    wanted = Answer(text, finish_reason="length" if len(ids) == 60 else "stop")
    if name == "deepseek-r1":
        reasoning, content = text.split("</think>", 1)
        wanted.reasoning = reasoning.rstrip("\n")
        wanted.content = STRAY.sub("\n", content.lstrip("\n")) or None
    elif name is not None and "</think>" in REASONING_PARSERS[name].tags:
        wanted.content = STRAY.sub("\n", text)
    elif special:
        # No tags of this format, but special tokens.
        wanted.content = text.replace("\n</think>\n", "")
    formats = {"reasoning_parser": name, "tool_call_parser": "hermes"}
    async with serving(**formats, tokenizer=tokenizer) as served, served.client() as client:
        options: Any = {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 60}
        assert await both(client, **options) == [wanted]
        assert await both(client, **options, tools=TOOLS) == [wanted]
        answers = await both(client, **options, tools=TOOLS, n=2, logprobs=True)
        assert answers == [dataclasses.replace(wanted, logprobs=len(ids))] * 2


#: what the chat template puts in front of an answer, by a variable of it
OPENS = "{{ '<think>\\n' if thinking else '' if plain else '<think>\\n\\n</think>\\n\\n' }}"


@pytest.fixture
def switched(directory: Path) -> Path:
    """The bundled model; ``thinking`` opens the reasoning in the prompt, ``plain`` leaves it to the model."""
    template = directory / "chat_template.jinja"
    marks = "{% if '</think>' in '' %}{% endif %}"
    template.write_text(marks + template.read_text() + OPENS)
    return directory


@rest(SECONDS)
@pytest.mark.parametrize("name", ["auto", "qwen3", "deepseek-r1"])
async def test_the_prompt_tells_whether_an_answer_begins_with_reasoning(
    bundled: Bundled, switched: Path, name: str
) -> None:
    async with bundled(switched, reasoning_parser=name) as client:

        async def ask(**kwargs: bool) -> list[Answer]:
            return await both(
                client,
                temperature=0,
                max_tokens=9,
                logit_bias={"1": -100},
                extra_body={"chat_template_kwargs": kwargs},
                n=2,
            )

        for answer in await ask(thinking=True):
            assert (bool(answer.reasoning), bool(answer.content)) == (True, False)
        for answer in await ask():
            assert (bool(answer.reasoning), bool(answer.content)) == (False, True)
        # A prompt without tags: the setting decides.
        for answer in await ask(plain=True):
            assert bool(answer.reasoning) == (name == "deepseek-r1")


@rest(SECONDS)
@pytest.mark.parametrize("special", grid([True], [None, False]))
@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
async def test_a_grammar_begins_where_the_prompt_ends(
    bundled: Bundled, switched: Path, name: str, special: bool | None
) -> None:
    tags = {} if special is None else add_tags(switched, "<think>", "</think>", special=special)
    schema = {"enum": ["yes", "no"]}
    formats: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bias = {str(tags["</think>"]): 14} if tags else {}
    async with bundled(switched, reasoning_parser=name) as client:

        async def ask(most: int, **kwargs: bool) -> list[Answer]:
            extra = {"chat_template_kwargs": kwargs}
            options: Any = {"response_format": formats, "logit_bias": bias, "max_tokens": most}
            return await both(client, **options, seed=1, n=4, temperature=2.0, extra_body=extra)

        for answer in await ask(100):
            assert (json.loads(answer.content or ""), answer.reasoning) in [("yes", None), ("no", None)]
        for answer in await ask(300, thinking=True):
            assert answer.reasoning or answer.content
            if answer.finish_reason == "stop":
                assert json.loads(answer.content or "") in schema["enum"]
            else:
                assert (answer.content or '"').startswith('"')
        if tags:
            assert any(answer.content for answer in await ask(300, thinking=True))
        # A choice is of the whole answer.
        (whole,) = await both(client, extra_body={"guided_choice": ["<b>hm</b>yes"]})
        assert f"{whole.reasoning or ''}{whole.content or ''}" == "<b>hm</b>yes"


@pytest.fixture
def in_channels(directory: Path) -> Path:
    """The bundled model with the tags of gpt-oss. Its own end token, which has the name of one of them, gets
    another."""
    for file in (*directory.glob("*.json"), *directory.glob("*.jinja")):
        file.write_text(file.read_text().replace("<|end|>", "<|over|>"))
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ '<|channel|>analysis<|message|>' if false }}")
    return directory


@rest(SECONDS)
@pytest.mark.parametrize("special", grid([True], [None, False]))
async def test_answers_in_the_channels_of_gpt_oss(
    bundled: Bundled, in_channels: Path, special: bool | None
) -> None:
    tags = {} if special is None else add_tags(in_channels, *TAGS, special=special)
    schema = {"enum": ["yes", "no"]}
    formats: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    # So that thoughts end. Two calls are one only where <|call|> ends the output.
    bias = {str(tags["<|end|>"]): 14, str(tags["<|call|>"]): -100} if tags else {}
    options: Any = {"logit_bias": bias, "seed": 1, "n": 4, "temperature": 2.0, "max_tokens": 400}
    async with bundled(in_channels, reasoning_parser="auto", tool_call_parser="auto") as client:
        for answer in await both(client, response_format=formats, **options):
            assert answer.finish_reason == "length" or json.loads(answer.content or "") in schema["enum"]
            assert "<|" not in (answer.content or "")
            assert tags == {} or answer.finish_reason == "stop"
        answers = await both(client, tools=TOOLS, tool_choice="required", **options)
        assert tags == {} or any(answer.calls for answer in answers)
        for answer in answers:
            if answer.finish_reason != "length":
                answer.check()
                assert answer.calls
                assert answer.finish_reason == "tool_calls"
                assert "<|" not in f"{answer.content}{answer.reasoning}"
