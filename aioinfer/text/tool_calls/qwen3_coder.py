"""Calls as tags with the arguments between them: the format of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tags import partial_length
from aioinfer.text.tool_calls.base import LONGEST_EARLY, LONGEST_HEAD, Functions, JsonObject, ToolCallParser
from aioinfer.text.tool_calls.raw_values import (
    ANY,
    References,
    Signatures,
    as_json,
    parameters_of,
    quoted,
    raw_text,
)

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Qwen3Coder"]

_CLOSING, _VALUE_CLOSING = "</tool_call>", "</parameter>"
_FUNCTION = regex.compile(r'\s*+<function=(?P<name>[^<>\s"]++)>')
_PARAMETER = regex.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)>")
_FUNCTION_END = regex.compile(r"\s*+</function>")
_VALUE_END = regex.compile(rf"\s*+{_VALUE_CLOSING}")
#: a key that the end of the output cuts off
_KEY_BEGIN = regex.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)")
_STRING = frozenset({"string"})
_VALUE_LINE = f"\n{_VALUE_CLOSING}\n"
#: keywords of an object whose parameters follow from more than its properties
_NOT_LISTED = (
    *("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_DEFINITIONS = ("$defs", "definitions", "$schema", "$id")


class Qwen3Coder(ToolCallParser):
    r"""``<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n...</function>\n</tool_call>``.

    A value is raw text without the line breaks next to its tags. As in vLLM and SGLang, it is a string unless
    the function's schema names another type for it, or has ``properties`` or ``items``: then it is JSON, or a
    string if it cannot be or is longer than 16 Ki characters. A value that is ``None``, ``True`` or ``False``
    counts as JSON. Where a schema allows strings and other types, text that is JSON of such another type is
    of that type.

    Strings are passed on as they arrive. So is what begins like a list or an object where strings are not
    allowed: it may turn out not to be JSON (``[None]``, ``{'a': 1}``), and then neither are the arguments.
    """

    name: ClassVar[str] = "qwen3-coder"
    opening = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    tags: ClassVar[tuple[str, ...]] = (opening, _CLOSING)
    end = regex.compile(rf"\s*+{_CLOSING}")
    reads_schemas: ClassVar[bool] = True

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._signatures = functions if isinstance(functions, Signatures) else Signatures(functions or {})
        self._function = ""
        self._types = _STRING
        #: the JSON before the next parameter
        self._before = ""

    @staticmethod
    def in_template(template: str) -> bool:
        return all(tag in template for tag in (Qwen3Coder.opening, "<function=", "<parameter="))

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        parameters = _parameters_form(schema, rules)
        before, after = rules.text(f"\n<function={function}>\n"), rules.text("</function>\n")
        return f"{before} {parameters} {after} {rules.tag(_CLOSING)}"

    @property
    def unfinished(self) -> bool:
        return self._broken or self._state in (self._parameters, self._break, *self._values)

    @property
    def _values(self) -> tuple[Any, ...]:
        return self._string, self._whole_value, self._json, self._value_end

    def _end(self) -> None:
        # A value that is cut off is incomplete JSON.
        if self._state == self._whole_value:
            self._pass_on(self._held[: len(self._held) - partial_length(self._held, _VALUE_CLOSING)].strip())
        if self._state == self._parameters and (match := _KEY_BEGIN.match(self._held)):
            self._pass_on(f'{self._before}"{quoted(match["key"])}')
        super()._end()

    def _head(self) -> bool:
        match = self._matched(_FUNCTION)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        self._function = match["name"]
        self._begin(self._function)
        self._before = "{"
        return self._go(match.end(), self._parameters)

    def _parameters(self) -> bool:
        """Between values. What is neither a parameter nor the function's end ends the arguments."""
        match = _PARAMETER.match(self._held, partial=True) or _FUNCTION_END.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            self._pass_on("{}" if self._before == "{" else "}")
            return self._go(0, self._tail)
        if match.partial:
            return False
        if match.re is _FUNCTION_END:
            self._pass_on("{}" if self._before == "{" else "}")
            return self._go(match.end(), self._tail)
        self._types = self._signatures.types_of(self._function, match["key"])
        quote = '"' if self._types == _STRING else ""
        self._pass_on(f"{self._before}{json.dumps(match['key'], ensure_ascii=False)}: {quote}")
        self._before = ", "
        return self._go(match.end(), self._break)

    def _break(self) -> bool:
        """In front of a value: one line break belongs to the tag."""
        if not self._held:
            return False
        value = self._string if self._types == _STRING else self._whole_value
        return self._go(int(self._held[0] == "\n"), value)

    def _string(self) -> bool:
        at = self._held.find(_VALUE_CLOSING)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, _VALUE_CLOSING)
        # One line break belongs to the tag after it.
        upto = end - int(self._held[:end].endswith("\n"))
        self._pass_on(quoted(self._held[:upto]))
        if at < 0:
            self._held = self._held[upto:]
            return False
        self._pass_on('"')
        return self._go(at + len(_VALUE_CLOSING), self._parameters)

    def _whole_value(self) -> bool:
        """A value of another type than a string, or maybe so."""
        start = self._held.lstrip()
        near = len(self._held) - len(start) < LONGEST_EARLY
        if near and "string" not in self._types and start[:1] in ("{", "["):
            self._value = JsonObject()
            return self._go(0, self._json)
        at = self._held.find(_VALUE_CLOSING, 0, LONGEST_EARLY)
        if at >= 0:
            self._pass_on(as_json(self._held[:at].removesuffix("\n"), self._types))
            return self._go(at + len(_VALUE_CLOSING), self._parameters)
        if len(self._held) < LONGEST_EARLY:
            return False
        self._pass_on('"')
        return self._go(0, self._string)

    def _json(self) -> bool:
        """A list or an object."""
        end = self._value.end(self._held)
        upto = len(self._held) if end is None else end
        self._broken |= end is not None and not self._value.complete
        self._pass_on(self._held[:upto])
        return self._go(upto, self._json if end is None else self._value_end) and end is not None

    def _value_end(self) -> bool:
        return self._take(_VALUE_END, self._parameters, otherwise=lambda: self._go(0, self._parameters))


# -- the grammar of parameters --------------------------------------------------------------------------


def _parameters_form(schema: Mapping[str, Any], rules: Rules) -> str:
    """The parameters of a function: those that its schema lists in their order, or any if it lists none.

    Strings are raw text; their lengths, patterns and lists of values are obeyed. Other values are JSON. A
    text may be read as JSON of another type if the schema allows that, too. Raises ValueError.
    """
    try:
        return _Parameters(schema, rules).form()
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _Parameters:
    """Writes the forms of parameters."""

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
            if not isinstance(name, str) or not regex.fullmatch(r"[^<>\n]+", name):
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
        end = self._rules.text(_VALUE_LINE)
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
        return raw_text(schema, _VALUE_CLOSING, _VALUE_LINE, self._rules)

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
    if _VALUE_CLOSING in text:
        raise ValueError(f"allows a text with {_VALUE_CLOSING}, which calls of this format cannot express")
    return text
