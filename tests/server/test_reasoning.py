"""Reasoning through the real openai client."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from aioinfer.params import SamplingParams
from aioinfer.testing import ToyTokenizer, toy_generate
from aioinfer.text.reasoning import REASONING_PARSERS
from tests.server.chats import TOOLS, Answer, add_tags, both
from tests.server.conftest import Bundled, Serving


class ThinkingTokenizer(ToyTokenizer):
    """A tokenizer with tokens for the tags."""

    def __init__(self, special: bool) -> None:
        super().__init__()
        self._special = frozenset(range(4, 12)) if special else frozenset()
        for token in range(4, 12):
            self._pieces[token] = "\n</think>\n"
        if special:
            self.added_tokens = {"</think>": 4}
            self.special_tokens = frozenset({"</think>"})

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
        wanted.reasoning, wanted.content = reasoning.rstrip("\n"), content.lstrip("\n") or None
    elif special and name in (None, "mistral"):
        # No tags of this format, but special tokens.
        wanted.content = text.replace("\n</think>\n", "")
    server = {"reasoning_parser": name, "tool_call_parser": "hermes"}
    async with serving(server=server, tokenizer=tokenizer) as served, served.client() as client:
        options: Any = {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 60}
        assert await both(client, **options) == [wanted]
        assert await both(client, **options, tools=TOOLS) == [wanted]
        answers = await both(client, **options, tools=TOOLS, n=2, logprobs=True)
        assert answers == [dataclasses.replace(wanted, logprobs=len(ids))] * 2


async def test_a_response_format_leaves_room_for_reasoning(bundled: Bundled, directory: Path) -> None:
    tags = add_tags(directory, "<think>", "</think>", special=False)
    schema = {"enum": ["yes", "no"]}
    formats: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bias = {str(tags["<think>"]): 100, str(tags["</think>"]): 14}
    async with bundled(directory, reasoning_parser="qwen3") as client:
        answers = await both(client, response_format=formats, logit_bias=bias, seed=1, n=4, temperature=2.0)
        for answer in answers:
            assert json.loads(answer.content or "") in schema["enum"]
        assert any(answer.reasoning for answer in answers)
        extra = {"guided_choice": ["<b>hm</b>yes"]}
        assert (await both(client, extra_body=extra))[0].content == "<b>hm</b>yes"
