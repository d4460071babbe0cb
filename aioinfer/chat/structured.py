"""Structured output in request bodies: OpenAI's ``response_format``, and vLLM's and SGLang's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.fields import NESTED, check
from aioinfer.errors import InvalidRequest, shown
from aioinfer.params import Grammar

__all__ = ["parse_grammar"]

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


def parse_grammar(body: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """The grammar of a body and the field that has it, or None. Raises InvalidRequest, also for more than
    one."""
    found: list[tuple[str, Grammar]] = []
    if (grammar := _response_format(body.get("response_format"))) is not None:
        found.append(("response_format", grammar))
    for field, kind in _DIRECT.items():
        if body.get(field) is not None:
            found.append((field, _grammar(field, kind, body[field])))
    if _flag("guided_json_object", body.get("guided_json_object")):
        found.append(("guided_json_object", Grammar("json_object")))
    nested = body.get("structured_outputs")
    if nested is not None:
        if not isinstance(nested, dict):
            raise InvalidRequest("structured_outputs", "must be an object")
        check(nested, NESTED["structured_outputs"], "structured_outputs.")
        for key, kind in _NESTED.items():
            if nested.get(key) is not None:
                field = f"structured_outputs.{key}"
                found.append((field, _grammar(field, kind, nested[key])))
        if _flag("structured_outputs.json_object", nested.get("json_object")):
            found.append(("structured_outputs.json_object", Grammar("json_object")))
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"cannot be combined with {found[0][0]}")
    return found[0] if found else None


def _response_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("response_format", "must be an object")
    check(value, NESTED["response_format"], "response_format.")
    kind, wrapper, schema = value.get("type"), value.get("json_schema"), value.get("schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest("response_format.type", f"{shown(kind)} is not supported")
    if wrapper is not None and kind != "json_schema":
        raise InvalidRequest("response_format.json_schema", "needs the type json_schema")
    if schema is not None and kind != "json_object":
        raise InvalidRequest("response_format.schema", "needs the type json_object")
    if kind == "text":
        return None
    if kind == "json_object":
        return (
            Grammar("json_object") if schema is None else _grammar("response_format", "json_schema", schema)
        )
    if not isinstance(wrapper, dict):
        raise InvalidRequest("response_format.json_schema", "must be an object")
    check(wrapper, NESTED["response_format.json_schema"], "response_format.json_schema.")
    if wrapper.get("schema") is None:
        raise InvalidRequest("response_format.json_schema.schema", "is missing")
    return _grammar("response_format", "json_schema", wrapper["schema"])


def _grammar(field: str, kind: Any, value: Any) -> Grammar:
    """The grammar; a schema and choices may also be text. Raises InvalidRequest of ``field``."""
    try:
        return Grammar(kind, value)
    except InvalidRequest as refused:
        raise InvalidRequest(field, refused.message) from None


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, (bool, type(None))):
        raise InvalidRequest(field, "must be true or false")
    return bool(value)
