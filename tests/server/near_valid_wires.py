"""The same as :mod:`tests.server.near_valid` for the Responses and Messages endpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from aioinfer.chat.fields import Honoured, Table, Unsupported
from aioinfer.server.anthropic import fields as anthropic
from aioinfer.server.responses import fields as responses
from tests.server.near_valid import JUNK, WORDS, schema, value

__all__ = ["request"]

_Random = random.Random
_Make = Callable[[_Random], Any]


def _object(rng: _Random, table: Table, given: dict[str, Any]) -> dict[str, Any]:
    """``given``, sometimes with a further field of its table, with another value, without one of its own, or
    with one that nobody knows."""
    given = dict(given)
    chance = rng.random()
    if chance < 0.1:
        name = rng.choice(list(table))
        rule = table[name]
        neutral = rule.neutral if isinstance(rule, Unsupported) else ()
        given.setdefault(name, rng.choice([*neutral, None, *rng.sample(JUNK, 1)]))
    elif chance < 0.13 and given:
        given[rng.choice(list(given))] = rng.choice(JUNK)
    elif chance < 0.15 and given:
        del given[rng.choice(list(given))]
    elif chance < 0.17:
        given["nothing"] = 1
    return given


def _list(rng: _Random, make: _Make, most: int = 3) -> list[Any]:
    return [make(rng) if rng.random() < 0.98 else rng.choice(JUNK) for _ in range(rng.randint(1, most))]


def _word(rng: _Random) -> str:
    return str(rng.choice(WORDS))


# -- Responses -----------------------------------------------------------------------------------------


def _item(rng: _Random) -> Any:
    def part(rng: _Random) -> Any:
        text = {"type": rng.choice(["input_text", "output_text"]), "text": _word(rng)}
        return _object(rng, responses.NESTED["input[].content[] text"], text)

    content = rng.choice([_word(rng), _list(rng, part)])
    items: dict[str, dict[str, Any]] = {
        "message": {"role": rng.choice(["user", "assistant", "system", "developer"]), "content": content},
        "function_call": {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        "function_call_output": {"type": "function_call_output", "call_id": "1", "output": content},
        "reasoning": {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
    }
    kind = rng.choice(["message", "message", "message", *items])
    return _object(rng, responses.NESTED[f"input[] {kind}"], items[kind])


def _tool(rng: _Random) -> Any:
    if rng.random() < 0.2:
        return {"type": rng.choice(["web_search", "local_shell", "x"])}
    given = {"type": "function", "name": rng.choice(["f", "g"]), "parameters": schema(rng), "strict": True}
    return _object(rng, responses.NESTED["tools[] function"], given)


def _format(rng: _Random) -> Any:
    kinds: list[dict[str, Any]] = [{"type": "text"}, {"type": "json_object"}]
    kinds.append({"type": "json_schema", "name": "x", "schema": schema(rng)})
    return _object(rng, responses.NESTED["text.format"], rng.choice(kinds))


_IN_RESPONSES: Mapping[str, _Make] = {
    "input": lambda rng: rng.choice([_word(rng) or "a", _list(rng, _item, 5)]),
    "instructions": _word,
    "max_output_tokens": lambda rng: rng.randint(1, 5),
    "stop": lambda rng: rng.choice([_word(rng), [_word(rng)]]),
    "top_logprobs": lambda rng: rng.choice([0, 1, 20, 21]),
    "include": lambda rng: rng.choice([[responses.LOGPROBS], ["reasoning.encrypted_content"], ["x"]]),
    "tools": lambda rng: _list(rng, _tool, 2),
    "tool_choice": lambda rng: rng.choice(
        ["none", "auto", "required", {"type": "function", "name": "f"}, {"type": "web_search"}]
    ),
    "parallel_tool_calls": lambda rng: rng.random() < 0.5,
    "text": lambda rng: _object(rng, responses.NESTED["text"], {"format": _format(rng)}),
    "reasoning": lambda rng: _object(
        rng, responses.NESTED["reasoning"], {"effort": rng.choice(["none", "low", "medium", "x"])}
    ),
    "stream": lambda rng: rng.random() < 0.7,
    "stream_options": lambda rng: _object(rng, responses.NESTED["stream_options"], {}),
    "metadata": lambda rng: rng.choice([{"a": "b"}, {}, {"a": 1}]),
}


# -- Messages ------------------------------------------------------------------------------------------


def _block(role: str) -> _Make:
    def make(rng: _Random) -> Any:
        reference = _object(
            rng,
            anthropic.NESTED["messages[].content[].content[] tool_reference"],
            {"type": "tool_reference", "tool_name": rng.choice(["f", "g"])},
        )
        results = rng.choice([_word(rng), [{"type": "text", "text": _word(rng)}, reference]])
        blocks: dict[str, dict[str, Any]] = {
            "text": {"text": _word(rng)},
            "thinking": {"thinking": "hm", "signature": ""},
            "tool_use": {"id": "1", "name": "f", "input": {}},
            "tool_result": {"tool_use_id": "1", "content": results, "is_error": rng.random() < 0.5},
        }
        own = {"user": ["text", "tool_result"], "assistant": ["text", "thinking", "tool_use"]}
        kind = rng.choice(["text", "text", *own[role], *([] if rng.random() < 0.9 else blocks)])
        return _object(rng, anthropic.NESTED[f"messages[].content[] {kind}"], {"type": kind, **blocks[kind]})

    return make


def _message(rng: _Random) -> Any:
    role = rng.choice(["user", "user", "assistant", "system"])
    given: dict[str, Any] = {"role": role}
    if role == "system":
        config = {"effort": rng.choice([*anthropic.EFFORTS, "x"])}
        given["output_config"] = _object(rng, anthropic.NESTED["messages[].output_config"], config)
        given["clear_at"] = rng.choice(anthropic.CLEARINGS)
        given["content"] = rng.choice([_word(rng), [], None])
    else:
        given["content"] = rng.choice([_word(rng), _list(rng, _block(role))])
    return _object(rng, anthropic.NESTED["messages[]"], given)


def _custom(rng: _Random) -> Any:
    if rng.random() < 0.2:
        return {"type": rng.choice(["web_search_20250305", "tool_search_tool_bm25", "x"]), "name": "w"}
    given = {"name": rng.choice(["f", "g"]), "input_schema": schema(rng), "strict": True}
    given["defer_loading"] = rng.random() < 0.3
    return _object(rng, anthropic.NESTED["tools[] custom"], given)


def _choice(rng: _Random) -> Any:
    given = {"type": rng.choice(["auto", "any", "none", "tool", "x"])}
    given |= {"name": "f"} if given["type"] == "tool" else {}
    return _object(rng, anthropic.NESTED["tool_choice"], given)


def _wanted(rng: _Random) -> Any:
    return _object(
        rng, anthropic.NESTED["output_config.format"], {"type": "json_schema", "schema": schema(rng)}
    )


_IN_MESSAGES: Mapping[str, _Make] = {
    "messages": lambda rng: _list(rng, _message, 5),
    "system": lambda rng: rng.choice([_word(rng), [{"type": "text", "text": "a"}]]),
    "max_tokens": lambda rng: rng.randint(1, 5),
    "stop_sequences": lambda rng: [_word(rng)],
    "tools": lambda rng: _list(rng, _custom, 2),
    "tool_choice": _choice,
    "thinking": lambda rng: _object(
        rng,
        anthropic.NESTED["thinking"],
        {
            "type": rng.choice(["enabled", "disabled", "adaptive", "x"]),
            "display": rng.choice(anthropic.DISPLAYS),
        },
    ),
    "output_config": lambda rng: _object(rng, anthropic.NESTED["output_config"], {"format": _wanted(rng)}),
    "stream": lambda rng: rng.random() < 0.7,
}


def request(rng: _Random) -> tuple[str, dict[str, Any]]:
    """A path below the API's prefix, and a body."""
    path = rng.choice(["responses", "messages", "messages", "messages/count_tokens"])
    always: tuple[str, ...] = ("messages",)
    table, makers = anthropic.COUNT, _IN_MESSAGES
    if path == "responses":
        table, makers, always = responses.RESPONSES, _IN_RESPONSES, ("input", "max_output_tokens", "stream")
    elif path == "messages":
        table, always = anthropic.MESSAGES, ("messages", "max_tokens", "stream")
    body = {name: makers[name](rng) for name in always}
    weights = [
        6.0 if name in makers else 1.0 if isinstance(rule, Honoured) else 0.2 for name, rule in table.items()
    ]
    for name in rng.choices(list(table), weights, k=rng.choice([0, 1, 1, 2, 2, 3])):
        if name in makers:
            body[name] = makers[name](rng) if rng.random() < 0.96 else rng.choice(JUNK)
        else:
            body[name] = value(rng, name, table[name])
    return path, _object(rng, table, body) if rng.random() < 0.1 else body
