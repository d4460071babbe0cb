"""Fields: what is done with every field of an object of OpenAI's protocol.

There is one table per object. A field is *honoured*; or *harmless*, which is accepted because it cannot
change the answer; or *unsupported*, which is refused unless its value changes nothing. A field in no table
is refused. Null is the same as an absent field, everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aioinfer.chat.schemas import (
    ANY,
    FLAG,
    OBJECT,
    TEXT,
    Schema,
    array,
    choice,
    either,
    text,
)
from aioinfer.errors import InvalidRequest

__all__ = ["NESTED", "Harmless", "Honoured", "Table", "Unsupported", "check"]

#: characters of an unknown field in an error
_MAX_NAME = 80


@dataclass(frozen=True, slots=True)
class Honoured:
    """What the field does.

    ``param`` is its name in SamplingParams, if it has one. ``schema`` is the JSON schema of its value for the
    OpenAPI document, but for null; it follows from ``param``, and from the tables of the objects in it.
    ``required``: an object without it, or with null, is refused.
    """

    meaning: str
    param: str | None = None
    schema: Schema = field(default_factory=dict)
    required: bool = False


@dataclass(frozen=True, slots=True)
class Harmless:
    """Why the field cannot change the answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The values that change nothing, and what to use instead of others. ``code``: of the error."""

    neutral: tuple[Any, ...] = ()
    instead: str = ""
    code: str = "unsupported_parameter"


Table = Mapping[str, Honoured | Harmless | Unsupported]

_OFF = Unsupported((False,))
_NO = Unsupported()
_BOOKKEEPING = Harmless("the client's bookkeeping")

_NAME = text(pattern="[a-zA-Z0-9_-]{1,64}")
_FUNCTION = Honoured("`function`", schema=choice("function"), required=True)
_READ = "goes to the chat template"
_MAYBE = "goes to the chat template, which may not read it"
#: a JSON schema, or the text of one
_SCHEMA = either(OBJECT, FLAG, TEXT)

#: objects within the fields of a chat, by their path
NESTED: Mapping[str, Table] = {
    "response_format": {
        "type": Honoured(
            "`text`, `json_object` or `json_schema`",
            schema=choice("text", "json_object", "json_schema"),
            required=True,
        ),
        "json_schema": Honoured("of type `json_schema`"),
        "schema": Honoured("of type `json_object`: its JSON schema", schema=_SCHEMA),
    },
    "response_format.json_schema": {
        "schema": Honoured("the JSON schema", schema=_SCHEMA, required=True),
        "name": Harmless("a label"),
        "description": Harmless("a label"),
        "strict": Harmless("every schema is enforced"),
    },
    "structured_outputs": {
        "json": Honoured("as `guided_json`", schema=_SCHEMA),
        "json_object": Honoured("as `guided_json_object`", schema=FLAG),
        "regex": Honoured("as `guided_regex`", schema=TEXT),
        "choice": Honoured("as `guided_choice`", schema=either(array(TEXT, 1), TEXT)),
        "grammar": Honoured("as `guided_grammar`", schema=TEXT),
        "structural_tag": _NO,
        "whitespace_pattern": _NO,
        "disable_fallback": Harmless("there is no fallback"),
        "disable_any_whitespace": _OFF,
        "disable_additional_properties": _OFF,
    },
    "tools[]": {
        "type": _FUNCTION,
        "function": Honoured("a function", required=True),
        "cache_control": Harmless("how long a prefix stays cached"),
    },
    "tools[].function": {
        "name": Honoured("1 to 64 letters, digits, `_`, `-`", schema=_NAME, required=True),
        "description": Honoured("goes to the chat template", schema=TEXT),
        "parameters": Honoured("the JSON schema of the arguments", schema=OBJECT),
        "strict": Honoured("the arguments obey the schema", schema=FLAG),
    },
    "tool_choice": {"type": _FUNCTION, "function": Honoured("the function to call", required=True)},
    "tool_choice.function": {"name": Honoured("the function to call", schema=TEXT, required=True)},
    "messages[]": {
        "role": Honoured(_READ, schema=TEXT, required=True),
        "content": Honoured("text or a list of parts of text", schema=TEXT),
        "name": Honoured(_MAYBE, schema=ANY),
        "tool_calls": Honoured(_READ),
        "tool_call_id": Honoured(_MAYBE, schema=TEXT),
        "reasoning_content": Honoured(f"{_MAYBE}; also as `thinking`", schema=ANY),
        "reasoning": Honoured(f"{_MAYBE}; also as `thinking`", schema=ANY),
        "id": _BOOKKEEPING,
        "parsed": Harmless("the client's reading of `content`"),
        "cache_control": Harmless("how long a prefix stays cached"),
        "provider_specific_fields": _BOOKKEEPING,
        "type": Unsupported(("text", "message")),
        "refusal": _NO,
        "annotations": Unsupported(([],)),
        "audio": _NO,
        "images": Unsupported(([],)),
        "function_call": Unsupported((), "use tool_calls"),
        "prefix": Unsupported((False,), "use continue_final_message"),
        "partial": Unsupported((False,), "use continue_final_message"),
        "thinking_blocks": Unsupported(([],)),
        "reasoning_details": Unsupported(([],)),
    },
    "messages[].content[]": {
        "type": Honoured("`text`", schema=choice("text"), required=True),
        "text": Honoured("text", schema=TEXT, required=True),
        "id": _BOOKKEEPING,
        "index": _BOOKKEEPING,
        "cache_control": Harmless("how long a prefix stays cached"),
        "annotations": Unsupported(([],)),
    },
    "messages[].tool_calls[]": {
        "id": Honoured("goes to the chat template", schema=ANY),
        "type": Honoured("`function`", schema=choice("function")),
        "function": Honoured("the call", required=True),
        "index": _BOOKKEEPING,
        "provider_specific_fields": _BOOKKEEPING,
    },
    "messages[].tool_calls[].function": {
        "name": Honoured("goes to the chat template", schema=TEXT, required=True),
        "arguments": Honoured("goes to the chat template", schema=either(TEXT, OBJECT)),
        "parsed_arguments": Harmless("the client's reading of `arguments`"),
    },
}


def check(given: Mapping[str, Any], table: Table, path: str = "", also: frozenset[str] = frozenset()) -> None:
    """Raise InvalidRequest for a field that is not honoured and could change the answer.

    ``path`` is where the object ``given`` is in the body; fields in ``also`` are honoured, too.
    """
    for name, value in given.items():
        if value is None or name in also:
            continue
        rule = table.get(name)
        if rule is None:
            raise InvalidRequest(
                f"{path}{name[:_MAX_NAME]}", "is not a field that this server knows", code="unknown_parameter"
            )
        if isinstance(rule, Unsupported) and not any(_same(value, each) for each in rule.neutral):
            instead = f": {rule.instead}" if rule.instead else ""
            raise InvalidRequest(f"{path}{name}", f"is not supported by this server{instead}", code=rule.code)


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and is not true."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
