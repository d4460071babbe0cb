"""The form of arguments in Gemma's notation, from their JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioinfer.text.tool_calls.raw_text import raw_text
from aioinfer.text.tool_calls.raw_values import References, count_of, parameters_of

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["CLOSING", "OPENING", "QUOTE", "arguments_form"]

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY = re.compile(r"[^\s:,{}\[\]<](?:[^:,{}\[\]<]*[^\s:,{}\[\]<])?")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: keywords whose meaning this form does not have
_REFUSED = frozenset(
    {
        *("not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties", "prefixItems"),
        *("dependentRequired", "dependentSchemas", "contains", "uniqueItems"),
    }
)


def arguments_form(schema: Mapping[str, Any], rules: Rules) -> str:
    """The arguments of a function; an object's properties come in the order of its schema, or are any if that
    lists none. Raises ValueError for a schema that cannot be written."""
    try:
        return _Values(schema, rules).arguments()
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _Values:
    def __init__(self, root: Mapping[str, Any], rules: Rules) -> None:
        self._root = root
        self._references = References(root)
        self._rules = rules
        #: rules of referred schemas, which may refer to themselves
        self._named: dict[int, str] = {}
        self._any_value: str | None = None

    def arguments(self) -> str:
        return self.form({**self._references.resolved(self._root), "type": "object"})

    def form(self, schema: Any) -> str:
        """A value."""
        if schema is True or schema == {}:
            return self._any()
        if schema is False:
            raise ValueError("has a value that allows nothing")
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            return self._referred(self._references.resolved(schema))
        if not isinstance(schema, Mapping):
            raise ValueError("has a value that is not a schema")
        if found := sorted(_REFUSED & schema.keys()):
            raise ValueError(f"has {found[0]}, which calls of this format cannot express")
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            return self._choice([self._literal(value) for value in values])
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                if key == "allOf" and len(branches) != 1:
                    raise ValueError("has an allOf, which calls of this format cannot express")
                return self._choice([self.form(branch) for branch in branches])
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, (list, tuple)):
            raise ValueError("has a type that is not a name")
        return self._choice([self._typed(type_, schema) for type_ in types])

    def _typed(self, type_: str, schema: Mapping[str, Any]) -> str:
        match type_:
            case "string":
                return self._string(schema)
            case "integer" | "number":
                bounds = {key: schema[key] for key in _NUMBERS if key in schema}
                return self._rules.json({"type": type_, **bounds})
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        raise ValueError(f"has the unknown type {type_!r}")

    def _string(self, schema: Mapping[str, Any]) -> str:
        quote = self._rules.tag(QUOTE)
        if self._rules.is_token(QUOTE):
            return f"{quote} {raw_text(schema, QUOTE, '', self._rules)} {quote}"
        return f"{quote} {raw_text(schema, QUOTE, QUOTE, self._rules)}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._choice([self.form(schema.get("items", True))])
        least, most = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        names, needed = parameters_of(schema)
        if not names:
            more = schema.get("additionalProperties", True)
            if more is False:
                return '"{" "}"'
            pair = self._rules.shared("pair", f'{self._key_form()} ":" {self._choice([self.form(more)])}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        # From the last property to the first: what may follow with and without a value in front.
        first, further = '""', '""'
        for name, value in reversed(names.items()):
            pair = f"{self._rules.text(f'{_checked(name)}:')} {self._choice([self.form(value)])}"
            with_it = f"{pair} {further}"
            skipped = name not in needed
            first = self._rules.shared("rest", f"{with_it} | {first}" if skipped else with_it)
            with_it = f'"," {with_it}'
            further = self._rules.shared("rest", f"{with_it} | {further}" if skipped else with_it)
        return f'"{{" {first} "}}"'

    def _any(self) -> str:
        """A value of any type."""
        if self._any_value is None:
            self._any_value = self._rules.unused("any")
            self._rules.add(self._any_value, " | ".join(self._typed(type_, {}) for type_ in _TYPES))
        return self._any_value

    def _referred(self, schema: Mapping[str, Any]) -> str:
        if id(schema) not in self._named:
            name = self._named[id(schema)] = self._rules.unused("referred")
            self._rules.add(name, self.form(schema))
        return self._named[id(schema)]

    def _literal(self, value: Any) -> str:
        match value:
            case str():
                if QUOTE in value:
                    raise ValueError(f"allows a text with {QUOTE}, which calls of this format cannot express")
                quote = self._rules.tag(QUOTE)
                return f"{quote} {self._rules.text(value)} {quote}" if value else f"{quote} {quote}"
            case list():
                return " ".join(['"["', *_joined([self._literal(each) for each in value]), '"]"'])
            case dict():
                pairs = [
                    f"{self._rules.text(f'{_checked(key)}:')} {self._literal(each)}"
                    for key, each in value.items()
                ]
                return " ".join(['"{"', *_joined(pairs), '"}"'])
        return self._rules.text(json.dumps(value))

    def _choice(self, forms: list[str]) -> str:
        """One of several forms, as a rule."""
        return self._rules.shared("value", " | ".join(forms))

    def _key_form(self) -> str:
        return self._rules.shared("KEY", "/[^ \\t\\r\\n:,{}\\[\\]<]{1,64}/")


def _joined(forms: list[str]) -> list[str]:
    return [part for at, form in enumerate(forms) for part in ('","', form)[not at :]]


def _checked(name: Any) -> str:
    """A key that needs no quotation marks."""
    if not isinstance(name, str) or not _KEY.fullmatch(name):
        raise ValueError(f"has the property {name!r}, which calls of this format cannot express")
    return name
