"""Random requests that are almost right: every field of the protocol's tables in any combination, with values
that are mostly valid."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.server.openai.fields import CHAT, COMPLETION, NESTED

__all__ = ["JUNK", "WORDS", "request", "schema", "value"]

_VOCABULARY = 864
JUNK: list[Any] = [
    "",
    "x",
    -1,
    0,
    1,
    1.5,
    True,
    False,
    [],
    {},
    [1],
    ["x"],
    {"a": 1},
    1e300,
    2**70,
    [[]],
    [None],
]
WORDS = ["a", "cat", " the", "yes", "no", "é", "<|end|>", "\n", "zq"]

_Random = random.Random
_Make = Callable[[_Random], Any]


def _token(rng: _Random) -> int:
    return rng.choice([0, 1, 2, 7, 500, 863, rng.randrange(_VOCABULARY), rng.randrange(_VOCABULARY)])


def _tokens(rng: _Random, most: int = 4) -> list[int]:
    return [_token(rng) for _ in range(rng.randint(1, most))]


def schema(rng: _Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.randrange(6 if depth < 2 else 4)
    match kind:
        case 0:
            return {"enum": rng.sample(WORDS, 2)}
        case 1:
            return {"type": "integer", "minimum": 0, "maximum": rng.randint(0, 99)}
        case 2:
            return {"type": rng.choice(["boolean", "null", "string", "nothing"])}
        case 3:
            return {"const": rng.choice([1, None, "a"])}
        case 4:
            return {"type": "array", "items": schema(rng, depth + 1), "maxItems": 2}
    return {"type": "object", "properties": {"a": schema(rng, depth + 1)}, "required": ["a"]}


def _regex(rng: _Random) -> str:
    return rng.choice(
        ["[a-z]{1,4}", "cat", "(a|b)*c", "yes|no", "[^a]+", "(", "a{3,1}", "", "\\d+", "(?=a)b"]
    )


def _choices(rng: _Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(1, 3))


def _grammar(rng: _Random) -> str:
    return rng.choice(
        ['start: "a" | "cat"', "start: /[a-c]+/", 'root ::= "yes" | "no"', "start: nothing", ""]
    )


def _words(rng: _Random) -> list[Any]:
    every = [[token] for token in range(256)]
    return rng.choice([_choices(rng), [_tokens(rng, 2)], every, [rng.choice(WORDS), [_token(rng)]]])


def _bias(rng: _Random) -> dict[str, float]:
    return {
        str(token): rng.choice([-100, 100, 0, 0.5, -100, *([101] * (rng.random() < 0.03))])
        for token in _tokens(rng, 6)
    }


def _ends(rng: _Random) -> list[int]:
    return rng.choice([_tokens(rng), list(range(_VOCABULARY)), [0], []])


def _messages(rng: _Random) -> list[Any]:
    parts = [
        {"type": "text", "text": rng.choice(WORDS)},
        _object(rng, "messages[].content[]", {"type": "text"}),
    ]
    call = _object(rng, "messages[].tool_calls[]", {"function": {"name": "f", "arguments": "{}"}})
    message = _object(rng, "messages[]", {"role": "user", "content": rng.choice([*WORDS, parts])})
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    user = {"role": rng.choice(["user", "system", "cat"]), "content": rng.choice(WORDS)}
    if rng.random() < 0.05:
        return rng.choice([[user, {"role": "user"}], [user, message], [message]])
    return rng.choice([[user], [user], [user, answer, user]])


def _tools(rng: _Random) -> list[Any]:
    function = _object(
        rng, "tools[].function", {"name": rng.choice(["f", "g", "?"]), "parameters": schema(rng)}
    )
    return [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": function}][
        : rng.randint(1, 2)
    ]


def _choice(rng: _Random) -> Any:
    named = {"type": "function", "function": {"name": rng.choice(["f", "g"])}}
    return rng.choice(["none", "auto", "required", named, _object(rng, "tool_choice", named)])


def _format(rng: _Random) -> Any:
    wrapped = _object(rng, "response_format.json_schema", {"schema": schema(rng), "name": "x"})
    given: dict[str, Any] = rng.choice(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": wrapped},
            {"type": "x"},
        ]
    )
    return _object(rng, "response_format", given) if rng.random() < 0.1 else given


def _structured(rng: _Random) -> Any:
    makers: dict[str, _Make] = {"json": schema, "regex": _regex, "choice": _choices, "grammar": _grammar}
    kind = rng.choice(list(makers))
    given = {kind: makers[kind](rng)}
    return _object(rng, "structured_outputs", given) if rng.random() < 0.2 else given


def _one_of(*values: Any) -> _Make:
    return lambda rng: rng.choice(values)


#: field -> mostly valid values of it
_VALUES: dict[str, _Make] = {
    "temperature": _one_of(0, 0, 0.5, 1, 2, 1e-300, 100, -1),
    "top_p": _one_of(1, 0.5, 1e-300, 1e-9, 0),
    "top_k": _one_of(0, -1, 1, 5, 10**6),
    "min_p": _one_of(0, 0.5, 1, 1e-300),
    "top_n_sigma": _one_of(0, 1, 1e-300, 100),
    "seed": _one_of(0, 1, -5, 2**62, 2**63),
    "max_tokens": _one_of(1, 3, 5, 5, 8, 0, 10**9),
    "max_completion_tokens": _one_of(1, 3, 5, 5, 8),
    "min_tokens": _one_of(0, 1, 1, 3, 8, 9, 10**6),
    "stop": _one_of("a", ["a", "cat"], "\n", [], [""], "zzz"),
    "stop_regex": lambda rng: rng.choice([_regex(rng), [_regex(rng), "e"]]),
    "stop_token_ids": _ends,
    "ignore_eos": _one_of(True, False),
    "repetition_penalty": _one_of(1, 1.5, 0.01, 100, 1e-300),
    "presence_penalty": _one_of(0, 2, -2, 3),
    "frequency_penalty": _one_of(0, 2, -2, 0.1),
    "skip_special_tokens": _one_of(True, False),
    "include_stop_str_in_output": _one_of(True, False),
    "logit_bias": _bias,
    "allowed_token_ids": lambda rng: rng.choice(
        [_tokens(rng, 3), _tokens(rng, 30), [0], [1], *([[864]] * (rng.random() < 0.1))]
    ),
    "bad_words": _words,
    "response_format": _format,
    "structured_outputs": _structured,
    "guided_json": schema,
    "json_schema": schema,
    "guided_json_object": _one_of(True, False),
    "guided_regex": _regex,
    "regex": _regex,
    "guided_choice": _choices,
    "guided_grammar": _grammar,
    "ebnf": _grammar,
    "grammar": _grammar,
    "model": _one_of("tiny-chat", "tiny-chat", "gpt-4", ""),
    "n": _one_of(1, 1, 2, 3, 0, 200),
    "stream": _one_of(True, False),
    "stream_options": lambda rng: _object(rng, "stream_options", {"include_usage": rng.random() < 0.5}),
    "diffusion": _one_of(None, {}, {"steps": 2}, {"threshold": 0.5}),
    "priority": _one_of(0, 5, -5, 2**40),
    "cache_salt": _one_of("", "x", "y" * 300),
    "routing_key": _one_of("", "x"),
    "prompt_cache_key": _one_of("", "x"),
    "request_id": _one_of("a-1", "x y"),
    "tools": _tools,
    "tool_choice": _choice,
    "parallel_tool_calls": _one_of(True, False),
    "chat_template_kwargs": _one_of({}, {"enable_thinking": True}, {"add_generation_prompt": False}),
    "add_generation_prompt": _one_of(True, False),
    "continue_final_message": _one_of(True, False),
    "echo": _one_of(True, False),
    "best_of": _one_of(1, 2),
}


def request(rng: _Random) -> tuple[str, dict[str, Any]]:
    """A path below the API's prefix, and a body."""
    chat = rng.random() < 0.5
    table = CHAT if chat else COMPLETION
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 6), "temperature": rng.choice([0, 1])}
    body |= {"messages": _messages(rng)} if chat else {"prompt": _prompt(rng)}
    # Constraints often meet, and most requests have no mistake that hides what follows.
    weights = [_weight(name, rule) for name, rule in table.items()]
    for name in rng.choices(list(table), weights, k=rng.choice([0, 1, 2, 2, 3, 3, 4, 5])):
        if name not in ("messages", "prompt"):
            body[name] = value(rng, name, table[name])
    if rng.random() < 0.15:
        body |= _trap(rng)
    if rng.random() < 0.03:
        body[rng.choice(["temprature", "x", "", "Stop"])] = rng.choice(JUNK)
    return "chat/completions" if chat else "completions", body


def _trap(rng: _Random) -> dict[str, Any]:
    """Constraints that leave no token, at once or after some."""
    first, second = rng.sample(range(3, _VOCABULARY), 2)
    two, all_tokens = [first, second], list(range(_VOCABULARY))
    return rng.choice(
        [
            {"allowed_token_ids": two, "bad_words": [[second], [first] * rng.randint(1, 4)]},
            {"allowed_token_ids": [first], "stop_token_ids": [first], "min_tokens": 1},
            {"allowed_token_ids": two, "stop_token_ids": [first], "bad_words": [[second]], "min_tokens": 1},
            {"guided_choice": ["cat"], "bad_words": ["cat", "c", "ca", "a"]},
            {"guided_regex": "(ab){1,9}c", "allowed_token_ids": list(range(rng.randint(1, 400)))},
            {"stop_token_ids": all_tokens, "min_tokens": 1},
            {"guided_choice": ["cat"], "stop_token_ids": all_tokens},
            {"logit_bias": {str(first): -100}, "allowed_token_ids": [first], "repetition_penalty": 100},
        ]
    )


def _weight(name: str, rule: Any) -> float:
    constraint = {
        "bad_words",
        "allowed_token_ids",
        "min_tokens",
        "stop_token_ids",
        "logit_bias",
        "guided_choice",
    }
    return 8.0 if name in constraint else 2.0 if isinstance(rule, Honoured) else 0.1


def _prompt(rng: _Random) -> Any:
    if rng.random() < 0.03:
        return rng.choice([[864], [], [""], [[]], "a" * 5000, *JUNK])
    return rng.choice([rng.choice(WORDS), _tokens(rng), [rng.choice(WORDS), _tokens(rng)]])


def value(rng: _Random, name: str, rule: Any) -> Any:
    if rng.random() < 0.04:
        return rng.choice(JUNK)
    if name == "logprobs":
        return rng.choice([True, False, 0, 1, 3])
    if name == "top_logprobs":
        return rng.choice([0, 1, 20, 21])
    if isinstance(rule, Unsupported) and rule.neutral and rng.random() < 0.8:
        return rng.choice(rule.neutral)
    if isinstance(rule, Harmless) or name not in _VALUES:
        return rng.choice(JUNK)
    return _VALUES[name](rng)


def _object(rng: _Random, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with up to two more fields of the object at ``path``, or an unknown one."""
    table: Table = NESTED[path]
    names = [name for name in table if name not in given]
    for name in rng.sample(names, min(len(names), rng.choice([0, 0, 0, 1, 2]))):
        rule = table[name]
        neutral = rule.neutral if isinstance(rule, Unsupported) else ()
        given = {**given, name: rng.choice([*neutral, None, "x", *rng.sample(JUNK, 1)])}
    return {**given, "nothing": 1} if rng.random() < 0.03 else given
