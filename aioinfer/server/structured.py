"""Structured output in request bodies: OpenAI's ``response_format``, and vLLM's and SGLang's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aioinfer.errors import InvalidRequest
from aioinfer.params import Grammar

__all__ = ["STRUCTURED_FIELDS", "parse_grammar"]

#: body field -> kind of grammar, where the value is the grammar itself
_DIRECT = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
    "ebnf": "lark",
    "grammar": "lark",
}
#: key of vLLM's ``structured_outputs`` -> kind of grammar
_NESTED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
#: every body field that this module reads
STRUCTURED_FIELDS = frozenset({*_DIRECT, "response_format", "structured_outputs"})


def parse_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a body, or None. Raises InvalidRequest, also for more than one."""
    found: list[tuple[str, Grammar]] = []
    if (grammar := _response_format(body.get("response_format"))) is not None:
        found.append(("response_format", grammar))
    for field, kind in _DIRECT.items():
        if body.get(field) is not None:
            found.append((field, _grammar(field, kind, body[field])))
    nested = body.get("structured_outputs")
    if nested is not None:
        if not isinstance(nested, dict):
            raise InvalidRequest("structured_outputs", "must be an object")
        for key, kind in _NESTED.items():
            if nested.get(key) is not None:
                field = f"structured_outputs.{key}"
                found.append((field, _grammar(field, kind, nested[key])))
        if nested.get("json_object"):
            found.append(("structured_outputs.json_object", Grammar("json_object")))
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"cannot be combined with {found[0][0]}")
    return found[0][1] if found else None


def _response_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("response_format", "must be an object")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            wrapper = value.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            if schema is None:
                raise InvalidRequest("response_format.json_schema.schema", "is missing")
            return _grammar("response_format.json_schema.schema", "json_schema", schema)
        case other:
            raise InvalidRequest("response_format.type", f"{str(other)[:40]!r} is not supported")


def _grammar(field: str, kind: Any, value: Any) -> Grammar:
    """The grammar, with a JSON value as text; a schema may also be text."""
    written = {"json_schema": (dict, bool), "choice": (list,)}
    if isinstance(value, written.get(kind, ())):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise InvalidRequest(field, f"is not a {kind.replace('_', ' ')}")
    try:
        return Grammar(kind, value)
    except InvalidRequest as refused:
        raise InvalidRequest(field, refused.message) from None
