"""Chats through the real openai client, streamed and not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import openai
from tokenizers import AddedToken, Tokenizer

USER: Any = {"role": "user", "content": "What is 20 + 22?"}
WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ITEMS: Any = {"type": "array", "items": {"enum": ["a", "b", "</tool_call>"]}, "maxItems": 3}
LISTS: Any = {"type": "object", "properties": {"items": ITEMS}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "lists": LISTS}


def tool(name: str, parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", WEATHER, description="The weather of a city."), tool("lists", LISTS)]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'


@dataclass
class Answer:
    """One choice, whole or assembled from its deltas."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: int = 0

    def __eq__(self, other: object) -> bool:
        """Compare without the ids of calls, which differ in every request. A stream has no empty content."""
        return isinstance(other, Answer) and self._compared() == other._compared()

    def _compared(self) -> dict[str, Any]:
        return vars(self) | {"ids": 0, "content": self.content or None}

    def check(self) -> None:
        """The calls are well-formed."""
        assert len(set(self.ids)) == len(self.ids) == len(self.calls)
        for name, arguments in self.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def whole(client: openai.AsyncOpenAI, **options: Any) -> list[Answer]:
    answer = await client.chat.completions.create(**{"model": "tiny-chat", "messages": [USER], **options})
    answers = []
    for choice in answer.choices:
        message, logprobs = choice.message, choice.logprobs
        calls = message.tool_calls or []
        assert message.tool_calls is None or calls
        answers.append(
            Answer(
                message.content,
                getattr(message, "reasoning_content", None),
                [(call.function.name, call.function.arguments) for call in calls if call.type == "function"],
                [call.id for call in calls],
                choice.finish_reason,
                len(logprobs.content or []) if logprobs else 0,
            )
        )
    return answers


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> list[Answer]:
    options = {"model": "tiny-chat", "messages": [USER], "stream": True, **options}
    answers = [Answer() for _ in range(options.get("n", 1))]
    async for chunk in await client.chat.completions.create(**options):
        for choice in chunk.choices:
            answer, delta = answers[choice.index], choice.delta
            assert answer.finish_reason is None
            answer.finish_reason = choice.finish_reason
            answer.logprobs += len(choice.logprobs.content or []) if choice.logprobs else 0
            if delta.content is not None:
                answer.content = (answer.content or "") + delta.content
            if (reasoning := getattr(delta, "reasoning_content", None)) is not None:
                answer.reasoning = (answer.reasoning or "") + reasoning
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert (call.index, call.type, call.function.arguments) == (
                        len(answer.ids),
                        "function",
                        "",
                    )
                    answer.ids.append(call.id)
                    answer.calls.append((call.function.name or "", ""))
                else:
                    assert (call.index, call.type, call.function.name) == (len(answer.ids) - 1, None, None)
                    name, arguments = answer.calls[-1]
                    answer.calls[-1] = (name, arguments + (call.function.arguments or ""))
    return answers


async def both(client: openai.AsyncOpenAI, **options: Any) -> list[Answer]:
    """The answers; streamed they are the same."""
    first, second = await asyncio.gather(whole(client, **options), streamed(client, **options))
    assert first == second
    return first


def add_tags(directory: Path, *tags: str, special: bool) -> dict[str, int]:
    """The model has room for some more tokens than its tokenizer has."""
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    tokenizer.save(file)
    ids = {tag: tokenizer.token_to_id(tag) for tag in tags}
    return {tag: number for tag, number in ids.items() if number is not None}
