"""The form of calls whose arguments are raw text between tags, from the schema of the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioinfer.text.tool_calls.raw_text import raw_text
from aioinfer.text.tool_calls.raw_values import ANY, References, parameters_of

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["parameters_form"]

_CLOSING = "</parameter>"
_END = f"\n{_CLOSING}\n"
#: keywords of an object whose parameters follow from more than its properties
_NOT_LISTED = (
    *("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_DEFINITIONS = ("$defs", "definitions", "$schema", "$id")


def parameters_form(schema: Mapping[str, Any], rules: Rules) -> str:
    """The parameters of a function: those that its schema lists in their order, or any if it lists none.

    Strings are raw text; their lengths, patterns and lists of values are obeyed. Other values are JSON. A
    text may be read as JSON of another type if the schema allows that, too. Raises ValueError.
    """
    try:
        return _Parameters(schema, rules).form()
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _Parameters:
    def __init__(self, schema: Mapping[str, Any], rules: Rules) -> None:
        self._rules = rules
        self._root = schema
        self._references = References(schema)
        #: forms of values, by the schema
        self._known: dict[int, str] = {}

    def form(self) -> str:
        schema = self._references.resolved(self._root)
        if found := [key for key in _NOT_LISTED if key in schema]:
            raise ValueError(f"has {found[0]} at its top, which calls of this format cannot express")
        names, needed = parameters_of(schema)
        if not names:
            more = schema.get("additionalProperties", True)
            return self._any(more) if more is not False else '""'
        parts = []
        for name, value in names.items():
            if not isinstance(name, str) or not re.fullmatch(r"[^<>\n]+", name):
                raise ValueError(f"has the property {name!r}, which calls of this format cannot express")
            part = f"{self._rules.text(f'<parameter={name}>' + chr(10))} {self._value(value)}"
            parts.append(part if name in needed else f"({part})?")
        return " ".join(parts)

    def _any(self, schema: Any) -> str:
        key = self._rules.shared("KEY", "/[^<>\\n]{1,64}/")
        before, after = self._rules.text("<parameter="), self._rules.text(">\n")
        return f"({before} {key} {after} {self._value(schema)})*"

    def _value(self, schema: Any) -> str:
        """A value up to the end of its tag."""
        if schema is False:
            raise ValueError("has a property that allows nothing")
        schema = ANY if schema is True else self._references.resolved(schema)
        if id(schema) not in self._known:
            choices = dict.fromkeys(self._choices(schema, set()))
            self._known[id(schema)] = self._rules.shared("value", " | ".join(choices))
        return self._known[id(schema)]

    def _choices(self, schema: Any, seen: set[int]) -> list[str]:
        """The forms of a value. ``seen``: schemas whose forms are among them already."""
        end = self._rules.text(_END)
        schema = self._references.resolved(schema)
        if id(schema) in seen:
            return []
        seen.add(id(schema))
        if "string" not in (types := self._references.types_of(schema)):
            return [f"{self._rules.json(self._with_definitions(schema))} {end}"]
        if (values := _listed(schema)) is not None:
            return [f"{self._rules.text(_as_text(value))} {end}" for value in values]
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list) and "type" not in schema:
                if key == "allOf" and len(branches) != 1:
                    raise ValueError("has an allOf of strings, which calls of this format cannot express")
                return [choice for branch in branches for choice in self._choices(branch, seen)]
        others = sorted(types - {"string"})
        json_ = {**schema, "type": others}
        json_form = [f"{self._rules.json(self._with_definitions(json_))} {end}"] if others else []
        return [self._string(schema), *json_form]

    def _string(self, schema: Mapping[str, Any]) -> str:
        return raw_text(schema, _CLOSING, _END, self._rules)

    def _with_definitions(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema, with what its references may refer to."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        return {**{key: self._root[key] for key in _DEFINITIONS if key in self._root}, **schema}


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if _CLOSING in text:
        raise ValueError(f"allows a text with {_CLOSING}, which calls of this format cannot express")
    return text
