"""The grammar of parameters that are raw text between tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

from aioinfer.text.tool_calls.raw_values import ANY, References, parameters_of, raw_text

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Frame", "call_form"]

#: keywords of an object whose parameters follow from more than its properties
_NOT_LISTED = (
    *("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
#: a parameter's name
_NAME = r"""[^<>\n"'=]+"""
_DEFINITIONS = ("$defs", "definitions", "$schema", "$id")


class Frame(NamedTuple):
    """The text around the parts of a call, as models are told to write it.

    A line break next to a value belongs to its tags if ``value_end`` begins with one.
    """

    #: around the name of a function
    function: tuple[str, str]
    #: around the name of a parameter
    key: tuple[str, str]
    value_end: str
    #: empty if the closing tag of a call is the function's
    function_end: str
    #: some versions of the format have no line breaks
    breaks_optional: bool = False
    #: of parameters, within the tag: the value is a string ("true") or JSON ("false")
    attribute: str = ""
    #: the part of all tags that may be a token
    mark: str = ""

    @property
    def value_closing(self) -> str:
        """The tag behind a value."""
        return self.value_end.strip()


def call_form(function: str, schema: Mapping[str, Any], frame: Frame, rules: Rules) -> str:
    """A call up to its closing tag; its parameters are those that its schema lists in their order, or any if
    it lists none.

    Strings are raw text; their lengths, patterns and lists of values are obeyed. Other values are JSON. A
    text may be read as JSON of another type if the schema allows that, too. Raises ValueError.
    """
    parameters = _Parameters(schema, frame, rules)
    before, after = frame.function
    try:
        parts = [parameters.text(f"{before}{function}{after}"), parameters.form()]
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return " ".join([*parts, parameters.text(frame.function_end)] if frame.function_end else parts)


class _Parameters:
    """Writes the forms of parameters."""

    def __init__(self, schema: Mapping[str, Any], frame: Frame, rules: Rules) -> None:
        self._rules = rules
        self._frame = frame
        before, after = frame.key
        #: around the name of a parameter, up to its attribute
        self._key = (before, f'{after.removesuffix(">")} {frame.attribute}="' if frame.attribute else after)
        self._root = schema
        self._references = References(schema)
        #: forms of values, by the schema
        self._known: dict[int, str] = {}

    def text(self, text: str) -> str:
        """A part of the frame."""
        if self._frame.mark and self._frame.mark in text:
            return self._rules.tag(text)
        if not self._frame.breaks_optional or "\n" not in text:
            return self._rules.text(text)
        lines = [self._rules.text(line) if line else "" for line in text.split("\n")]
        return f" {self._rules.text(chr(10))}? ".join(lines)

    def form(self) -> str:
        """The parameters."""
        schema = self._references.resolved(self._root)
        if found := [key for key in _NOT_LISTED if key in schema]:
            raise ValueError(f"has {found[0]} at its top, which calls of this format cannot express")
        names, needed = parameters_of(schema)
        if not names:
            more = schema.get("additionalProperties", True)
            return self._any(more) if more is not False else '""'
        parts = []
        for name, value in names.items():
            if not isinstance(name, str) or not regex.fullmatch(_NAME, name):
                raise ValueError(f"has the property {name!r}, which calls of this format cannot express")
            part = f"{self.text(name.join(self._key))} {self._value(value)}"
            parts.append(part if name in needed else f"({part})?")
        return " ".join(parts)

    def _any(self, schema: Any) -> str:
        key = self._rules.shared("KEY", f"/{_NAME.replace('+', '{1,64}')}/")
        before, after = map(self.text, self._key)
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
        end = self.text(self._frame.value_end)
        schema = self._references.resolved(schema)
        if id(schema) in seen:
            return []
        seen.add(id(schema))
        if "string" not in (types := self._references.types_of(schema)):
            return [f"{self._kind('false')} {self._rules.json(self._with_definitions(schema))} {end}"]
        if (values := _listed(schema)) is not None:
            return [f"{self._listed(value)} {end}" for value in values]
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list) and "type" not in schema:
                if key == "allOf" and len(branches) != 1:
                    raise ValueError("has an allOf of strings, which calls of this format cannot express")
                return [choice for branch in branches for choice in self._choices(branch, seen)]
        others = sorted(types - {"string"})
        json_ = {**schema, "type": others}
        string = f"{self._kind('true')} {self._string(schema)}"
        if not others:
            return [string]
        return [string, f"{self._kind('false')} {self._rules.json(self._with_definitions(json_))} {end}"]

    def _kind(self, value: str) -> str:
        """The value of the attribute, to the end of its tag."""
        return self._rules.text(f'{value}">') if self._frame.attribute else ""

    def _listed(self, value: Any) -> str:
        """One of the values that a schema lists."""
        kind = self._kind("true" if isinstance(value, str) else "false")
        return f"{kind} {self._rules.text(self._as_text(value))}"

    def _string(self, schema: Mapping[str, Any]) -> str:
        closing, end = self._frame.value_closing, self._frame.value_end
        if self._rules.is_token(self._frame.mark):
            before = end[: end.index(self._frame.mark)]
            raw = raw_text(schema, closing, before, self._rules)
            return f"{raw} {self.text(end.removeprefix(before))}"
        if not self._frame.breaks_optional:
            return raw_text(schema, closing, end, self._rules)
        return f"{raw_text(schema, closing, closing, self._rules)} {self.text(end.removeprefix(closing))}"

    def _as_text(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        if (closing := self._frame.value_closing) in text:
            raise ValueError(f"allows a text with {closing}, which calls of this format cannot express")
        return text

    def _with_definitions(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema, with what its references may refer to."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        return {**{key: self._root[key] for key in _DEFINITIONS if key in self._root}, **schema}


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None
