"""Random requests that are almost right: every field of the bodies of all protocols in any combination, with
values that are mostly valid."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from aioinfer.chat.bodies import Object
from aioinfer.server.anthropic.fields import CountTokensBody, MessagesBody
from aioinfer.server.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody
from aioinfer.server.openai.fields import ChatBody, CompletionBody
from aioinfer.server.openapi.document import body_schema
from aioinfer.server.responses.fields import LOGPROBS, ResponsesBody

__all__ = ["SCHEMAS", "chat_request", "wire_request"]

_VOCABULARY = 864
_JUNK: list[Any] = [
    *("", "x", -1, 0, 1, 1.5, True, False, [], {}, [1], ["x"], {"a": 1}, 1e300, 2**70, [[]], [None])
]
_WORDS = ["a", "cat", " the", "yes", "no", "é", "<|end|>", "\n", "zq"]
_KINDS: Mapping[str, type[Object]] = {
    "chat/completions": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "messages/count_tokens": CountTokensBody,
    "embeddings": EmbeddingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
}
_WIRES = [*_KINDS][2:]
#: what the bodies of calls for no tokens need
_PLAIN: Mapping[str, dict[str, Any]] = {
    "embeddings": {"input": "a cat"},
    "score": {"text_1": "a", "text_2": ["yes", "no"]},
    "rerank": {"query": "a", "documents": ["yes", "no"]},
}

_Random = random.Random
_Make = Callable[[_Random], Any]


def _schema(kind: type[Object]) -> dict[str, Any]:
    components: dict[str, Any] = {}
    return {**body_schema(kind, components), "components": {"schemas": components}}


#: path below the API's prefix -> schema of the bodies
SCHEMAS = {path: _schema(kind) for path, kind in _KINDS.items()}


def _token(rng: _Random) -> int:
    return rng.choice([0, 1, 2, 7, 500, 863, rng.randrange(_VOCABULARY), rng.randrange(_VOCABULARY)])


def _tokens(rng: _Random, most: int = 4) -> list[int]:
    return [_token(rng) for _ in range(rng.randint(1, most))]


def _constraint(rng: _Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema that an answer has to obey."""
    match rng.randrange(6 if depth < 2 else 4):
        case 0:
            return {"enum": rng.sample(_WORDS, 2)}
        case 1:
            return {"type": "integer", "minimum": 0, "maximum": rng.randint(0, 99)}
        case 2:
            return {"type": rng.choice(["boolean", "null", "string", "nothing"])}
        case 3:
            return {"const": rng.choice([1, None, "a"])}
        case 4:
            return {"type": "array", "items": _constraint(rng, depth + 1), "maxItems": 2}
    return {"type": "object", "properties": {"a": _constraint(rng, depth + 1)}, "required": ["a"]}


def _one_of(*values: Any) -> _Make:
    return lambda rng: rng.choice(values)


_REGEX = _one_of("[a-z]{1,4}", "cat", "(a|b)*c", "yes|no", "[^a]+", "(", "a{3,1}", "", "\\d+", "(?=a)b")
_GRAMMAR = _one_of('start: "a" | "cat"', "start: /[a-c]+/", 'root ::= "yes" | "no"', "start: nothing", "")
_NAME = _one_of("f", "f", "g", "?")


def _choices(rng: _Random) -> list[str]:
    return rng.sample(_WORDS, rng.randint(1, 3))


def _words(rng: _Random) -> list[Any]:
    every = [[token] for token in range(256)]
    return rng.choice([_choices(rng), [_tokens(rng, 2)], every, [rng.choice(_WORDS), [_token(rng)]]])


#: field, wherever it is -> mostly valid values of it
_VALUES: Mapping[str, _Make] = {
    "temperature": _one_of(0, 0, 0.5, 1, 2, 1e-300, 100, -1),
    "top_p": _one_of(1, 0.5, 1e-300, 1e-9, 0),
    "top_k": _one_of(0, -1, 1, 5, 10**6),
    "max_tokens": _one_of(1, 3, 5, 5, 8),
    "max_output_tokens": _one_of(1, 3, 5),
    "max_completion_tokens": _one_of(1, 3, 5, 8),
    "min_tokens": _one_of(0, 1, 1, 3, 8, 9, 10**6),
    "stop": _one_of("a", ["a", "cat"], "\n", [], [""], "zzz"),
    "stop_sequences": _one_of(["a"], ["a", "cat"], []),
    "stop_regex": lambda rng: rng.choice([_REGEX(rng), [_REGEX(rng), "e"]]),
    "stop_token_ids": lambda rng: rng.choice([_tokens(rng), list(range(_VOCABULARY)), [0], []]),
    "logit_bias": lambda rng: {str(each): rng.choice([-100, 100, 0, 0.5, -100]) for each in _tokens(rng, 6)},
    "allowed_token_ids": lambda rng: rng.choice([_tokens(rng, 3), _tokens(rng, 30), [0], [1], [864]]),
    "bad_words": _words,
    "guided_json": _constraint,
    "json_schema": _constraint,
    "json": _constraint,
    "schema": _constraint,
    "input_schema": _constraint,
    "parameters": lambda rng: {"type": "object", "properties": {"a": _constraint(rng, 1)}},
    "guided_regex": _REGEX,
    "regex": _REGEX,
    "guided_choice": _choices,
    "choice": _choices,
    "guided_grammar": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "grammar": _GRAMMAR,
    "model": _one_of("tiny-chat", "tiny-chat", "gpt-4", ""),
    "n": _one_of(1, 1, 2, 3, 0, 200),
    "include": _one_of([LOGPROBS], ["reasoning.encrypted_content"], ["x"]),
    "cache_salt": _one_of("", "x", "y" * 300),
    "request_id": _one_of("a-1", "x y"),
    "chat_template_kwargs": _one_of({}, {"enable_thinking": True}, {"add_generation_prompt": False}),
    "metadata": _one_of({"a": "b"}, {}, {"a": 1}),
    "prompt": lambda rng: rng.choice([rng.choice(_WORDS), _tokens(rng), [rng.choice(_WORDS), _tokens(rng)]]),
    "name": _NAME,
    "tool_name": _NAME,
    "call_id": _one_of("1"),
    "tool_use_id": _one_of("1"),
    "waiting_timeout": _one_of(60, 0),
    "running_timeout": _one_of(60, 0),
    "deadline": _one_of(60, 0),
    "ttft_target": _one_of(60, 0),
    "itl_target": _one_of(1, 0),
    "role": _one_of("user", "user", "assistant", "system", "cat"),
    "arguments": _one_of("{}", "{", '{"a": 1}'),
}
#: fields that often meet
_OFTEN = frozenset(
    {"bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids", "logit_bias", "guided_choice"}
)


def _value(rng: _Random, name: str, schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> Any:
    """A value of a field, mostly one that its schema admits."""
    if rng.random() < 0.03:
        return rng.choice(_JUNK)
    if name in _VALUES and rng.random() < 0.97:
        return _VALUES[name](rng)
    return _of(rng, schema, whole, depth)


def _of(rng: _Random, schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        return _object(rng, whole["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], whole, depth)
    if "anyOf" in schema:
        several = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return _of(rng, rng.choice(several), whole, depth)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "integer":
            return rng.randint(schema.get("minimum", 0), min(schema.get("maximum", 9), 9))
        case "number":
            return rng.choice([0, 0.5, 1])
        case "boolean":
            return rng.random() < 0.5
        case "string":
            return rng.choice(_WORDS)
        case "array":
            return [_of(rng, schema["items"], whole, depth + 1) for _ in range(rng.randint(1, 3))]
        case "object" if "properties" in schema:
            return _object(rng, schema, whole, depth)
    return rng.choice(_JUNK)


def _object(rng: _Random, schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """An object: what it needs, sometimes without one of that, with a few other fields or an unknown one."""
    properties = schema["properties"]
    names = [name for name in schema.get("required", ()) if rng.random() > 0.01]
    weights = [_weight(name, properties[name]) for name in properties]
    count = rng.choice([0, 1, 2, 2, 3, 3, 4, 5] if depth == 0 else [0, 0, 1, 2])
    names += rng.choices(list(properties), weights, k=count)
    found = {name: _value(rng, name, properties[name], whole, depth + 1) for name in dict.fromkeys(names)}
    if rng.random() < 0.02:
        found[rng.choice(["temprature", "x", "", "Stop"])] = rng.choice(_JUNK)
    return found


def _weight(name: str, schema: Mapping[str, Any]) -> float:
    idle = schema.get("description", "").startswith(("has no effect", "other values"))
    return 8.0 if name in _OFTEN else 0.1 if idle else 2.0


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


def chat_request(rng: _Random) -> tuple[str, dict[str, Any]]:
    """A path of OpenAI's chats and completions, and a body."""
    path = rng.choice(["chat/completions", "completions"])
    body = {"max_tokens": rng.randint(1, 6), "temperature": rng.choice([0, 1]), **_body(rng, path)}
    if path == "chat/completions" and rng.random() < 0.6:
        body["messages"] = [{"role": "user", "content": rng.choice(_WORDS)}]
    return path, body | (_trap(rng) if rng.random() < 0.15 else {})


def wire_request(rng: _Random) -> tuple[str, dict[str, Any]]:
    """A path of the other protocols, and a body."""
    path = rng.choice([*_WIRES, "responses", "messages", "messages"])
    body = _body(rng, path)
    if path == "responses":
        body = {"max_output_tokens": rng.randint(1, 5), "stream": rng.random() < 0.7, **body}
        plain: dict[str, Any] = {"input": rng.choice(_WORDS)}
    elif path in _PLAIN:
        plain = _PLAIN[path]
    else:
        body |= {"stream": rng.random() < 0.7} if path == "messages" else {}
        plain = {"messages": [{"role": "user", "content": rng.choice(_WORDS)}]}
    return path, body | (plain if rng.random() < 0.4 else {})


def _body(rng: _Random, path: str) -> dict[str, Any]:
    return _object(rng, SCHEMAS[path], SCHEMAS[path], 0)
