"""Arguments that are written as raw text: their JSON, which depends on the types that a schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from aioinfer.text.schema_references import targets_of

__all__ = ["ANY", "References", "as_json", "quoted"]

#: a schema that allows anything: one object, so that its id is its own
ANY: Mapping[str, Any] = {}
_STRING = frozenset({"string"})
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
#: What Python calls them: the templates write values of earlier calls so. "null" of JSON is read without it.
_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
#: references that lead to each other
_MOST_REFERENCES = 16
_UNIONS = ("anyOf", "oneOf", "allOf")


class References:
    """What the references within a schema lead to."""

    def __init__(self, root: Any) -> None:
        self._root = root

    @cached_property
    def _targets(self) -> Mapping[str, Any]:
        return targets_of(self._root)[0]

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a schema that is a reference refers to; an empty schema if it leads nowhere."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._targets.get(schema["$ref"])
        return schema if isinstance(schema, Mapping) else ANY

    def types_of(self, schema: Any) -> frozenset[str]:
        """The types that a schema allows, as far as it names them; a string if it names none."""
        found: set[str] = set()
        seen: set[str] = set()
        left = [schema]
        while left:
            each = left.pop()
            if not isinstance(each, Mapping):
                continue
            named = each.get("type")
            given = named if isinstance(named, list) else [named]
            if types := _TYPES.intersection(name for name in given if isinstance(name, str)):
                found |= types
                continue
            values = each["enum"] if isinstance(each.get("enum"), list) else []
            found.update(map(_type_of, [*values, each["const"]] if "const" in each else values))
            for key in _UNIONS:
                left += each[key] if isinstance(each.get(key), list) else []
            reference = each.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                left.append(self._targets.get(reference))
        return frozenset(found) or _STRING


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: a string if the types allow no other, or if the text is not JSON of one of them.

    Text that is JSON of a type that is not allowed is left to the receiver, unless a string is allowed.
    """
    if types == _STRING:
        return f'"{quoted(text)}"'
    written = text.strip()
    written = _LITERALS.get(written.lower(), written)
    try:
        type_ = _type_of(json.loads(written, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return f'"{quoted(text)}"'
    allowed = type_ in types or (type_ == "integer" and "number" in types)
    return written if allowed or "string" not in types else f'"{quoted(text)}"'


def quoted(text: str) -> str:
    """The part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
