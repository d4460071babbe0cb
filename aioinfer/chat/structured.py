"""Structured output in request bodies: OpenAI's ``response_format``, and vLLM's and SGLang's fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aioinfer.chat.bodies import Object, admit
from aioinfer.chat.fields import ResponseFormat, StructuredOutputs, TextWithHoles
from aioinfer.errors import InvalidRequest
from aioinfer.params import Grammar
from aioinfer.text.text_template import TextTemplate

__all__ = ["format_grammar", "parse_grammar"]

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
#: attribute of StructuredOutputs -> kind of grammar
_NESTED = {"json_": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


def parse_grammar(body: Object, response_format: Any = None) -> tuple[str, Grammar] | None:
    """The grammar of a body and the field that has it, or None. Raises InvalidRequest, also for more than
    one."""
    found = [*_grammars(body, response_format)]
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"cannot be combined with {found[0][0]}")
    return found[0] if found else None


def _grammars(body: Object, response_format: Any) -> Iterator[tuple[str, Grammar]]:
    grammar = format_grammar(response_format)
    if grammar is not None:
        yield "response_format", grammar
    for field, kind in _DIRECT.items():
        value = getattr(body, field, None)
        if value is not None:
            yield field, _grammar(field, kind, value)
    if getattr(body, "guided_json_object", False):
        yield "guided_json_object", Grammar("json_object")
    given = getattr(body, "structured_outputs", None)
    if given is None:
        return
    nested = admit(StructuredOutputs, given, "structured_outputs")
    for name, kind in _NESTED.items():
        value = getattr(nested, name)
        if value is not None:
            field = f"structured_outputs.{name.rstrip('_')}"
            yield field, _grammar(field, kind, value)
    if nested.template is not None:
        field = "structured_outputs.template"
        yield field, _template(field, nested.template)
    if nested.json_object:
        yield "structured_outputs.json_object", Grammar("json_object")


def _template(field: str, value: Any) -> Grammar:
    if not isinstance(value, Mapping):
        return TextTemplate.of(value, field=field).grammar(field)
    given = admit(TextWithHoles, value, field)
    return TextTemplate.of(given.text, given.holes, field).grammar(field)


def format_grammar(value: Any) -> Grammar | None:
    """The grammar of a ``response_format``; None: any text. Raises InvalidRequest."""
    if value is None:
        return None
    given = admit(ResponseFormat, value, "response_format")
    if given.json_schema is not None and given.type != "json_schema":
        raise InvalidRequest("response_format.json_schema", "needs the type json_schema")
    if given.schema_ is not None and given.type != "json_object":
        raise InvalidRequest("response_format.schema", "needs the type json_object")
    if given.type == "text":
        return None
    if given.type == "json_object" and given.schema_ is None:
        return Grammar("json_object")
    if given.type == "json_schema" and given.json_schema is None:
        raise InvalidRequest("response_format.json_schema", "is missing")
    schema = given.schema_ if given.json_schema is None else given.json_schema.schema_
    return _grammar("response_format", "json_schema", schema)


def _grammar(field: str, kind: Any, value: Any) -> Grammar:
    """The grammar; a schema and choices may also be text. Raises InvalidRequest of ``field``."""
    try:
        return Grammar(kind, value)
    except InvalidRequest as refused:
        raise InvalidRequest(field, refused.message) from None
