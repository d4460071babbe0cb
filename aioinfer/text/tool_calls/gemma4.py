"""Calls in a notation of their own, with a tag as quotation mark: the format of Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tags import partial_length
from aioinfer.text.tool_calls.base import LONGEST_EARLY, LONGEST_HEAD, Functions, ToolCallParser
from aioinfer.text.tool_calls.raw_values import (
    References,
    Signatures,
    as_json,
    count_of,
    parameters_of,
    quoted,
    raw_text,
)

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Gemma4"]

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_QUOTE = regex.escape(QUOTE)
#: white space where models may write any: bounded, since what may follow is held back
_SPACE = r"\s{0,256}+"
#: models omit "call", or the colon, too
_FUNCTION = regex.compile(
    rf"{_SPACE}(?P<word>(?:call{_SPACE})?+:{_SPACE}|call\s{{1,256}}+)?+(?P<name>[^\s{{}}<>\"']++){_SPACE}\{{"
)
_BARE_KEY = r"(?P<bare>[^\s:,{}\[\]<][^:,{}\[\]<]*+)"
_KEY = regex.compile(rf"{_SPACE}(?:{_QUOTE}(?P<quoted>[^<]*+){_QUOTE}|{_BARE_KEY}){_SPACE}:")
_STRING = regex.compile(rf"{_SPACE}{_QUOTE}")
_OPEN = regex.compile(rf"{_SPACE}(?P<bracket>[{{\[])")
_CLOSE = regex.compile(rf"{_SPACE}(?P<bracket>[}}\]])")
_COMMA = regex.compile(rf"{_SPACE},")
_TAG_REST = f"(?:{'|'.join(regex.escape(tag[1:]) for tag in (OPENING, CLOSING, QUOTE))})"
#: a "<" that begins no tag belongs to it
_BARE = regex.compile(
    rf"{_SPACE}(?P<value>(?:[^\s,{{}}\[\]<]|<(?!{_TAG_REST}))(?:[^,{{}}\[\]<]|<(?!{_TAG_REST}))*+)(?=[,{{}}\[\]<])"
)
_CHARACTER = rf"<(?!{_TAG_REST})|\\[^<]"
#: a string between the quotation marks of JSON or Python
_QUOTED = regex.compile(
    rf"""{_SPACE}(?P<value>"(?:[^"\\<]|{_CHARACTER})*+"|'(?:[^'\\<]|{_CHARACTER})*+')(?={_SPACE}[,}}\]<])"""
)
_NO_VALUE = regex.compile(rf"{_SPACE}(?=[,}}])")
#: the types of what is not between quotation marks
_OTHER_TYPES = frozenset({"number", "boolean", "null"})
_BRACKETS = {"{": "}", "[": "]"}
#: a key that needs no quotation marks
_BARE_NAME = regex.compile(r"[^\s:,{}\[\]<](?:[^:,{}\[\]<]*[^\s:,{}\[\]<])?")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_STRING_ONLY = frozenset({"string"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: keywords whose meaning this form does not have
_REFUSED = frozenset(
    {
        *("not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties", "prefixItems"),
        *("dependentRequired", "dependentSchemas", "contains", "uniqueItems"),
    }
)


class Gemma4(ToolCallParser):
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>``.

    Strings are between the tags ``<|"|>``, without escapes, and keys are bare; the rest is as in JSON. What
    is neither, is a string. ``None``, ``True`` and ``False`` count as JSON.

    The schema of the function decides where the notation does not fit it: a number where it wants a string is
    text as it was written, and a string is read as JSON where it allows none, if it is not longer than 16 Ki
    characters. Other quotation marks count as the tags, and no value where a string may be is an empty one.
    """

    name: ClassVar[str] = "gemma4"
    opening = OPENING
    separator: ClassVar[str | None] = ""
    tags: ClassVar[tuple[str, ...]] = (OPENING, CLOSING, QUOTE)
    reads_schemas: ClassVar[bool] = True
    #: models write a brace too many
    end = regex.compile(rf"(?:{_SPACE}\}})?+{_SPACE}{regex.escape(CLOSING)}")

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._signatures = functions if isinstance(functions, Signatures) else Signatures(functions or {})
        self._references = References({})
        #: the schema of the value, and those of the values that it is within
        self._schema: Any = None
        self._schemas: list[Any] = []
        #: the brackets that are open, and whether there is a value within each
        self._open: list[str] = []
        self._filled: list[bool] = []

    @staticmethod
    def in_template(template: str) -> bool:
        return f"{OPENING}call:" in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return f"{rules.text(f'call:{function}')} {_arguments_form(schema, rules)} {rules.tag(CLOSING)}"

    @property
    def unfinished(self) -> bool:
        return self._broken or self._state in (self._key, self._item, *self._strings, self._next)

    @property
    def _strings(self) -> tuple[Any, ...]:
        return self._string, self._other_string

    def _end(self) -> None:
        # What is cut off is incomplete JSON.
        cut = self._held[: len(self._held) - partial_length(self._held, QUOTE)].strip()
        if self._state == self._item and cut:
            self._pass_on(self._comma() + cut)
        if self._state == self._key and (key := cut.removeprefix(QUOTE).removesuffix(QUOTE)):
            self._pass_on(f'{self._comma()}"{quoted(key)}')
        if self._state == self._other_string:
            self._pass_on(f'"{quoted(cut)}')
        super()._end()

    def _head(self) -> bool:
        match = self._matched(_FUNCTION)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        if not match["word"] and self._functions and match["name"] not in self._functions:
            return self._no_call()
        self._begin(match["name"])
        self._open, self._filled, self._schemas = [], [], []
        self._references = self._signatures.references(match["name"])
        self._schema = self._signatures.get(match["name"])
        return self._enter("{", match.end())

    def _key(self) -> bool:
        """Parse a key of an object, or its end."""
        if match := _CLOSE.match(self._held):
            return self._leave(match["bracket"], match.end())
        match = self._matched(_KEY)
        if match is None:
            return self._break_off()
        if match.partial:
            return False
        key = _unquoted(match["bare"].rstrip()) if match["quoted"] is None else match["quoted"]
        self._schema = self._references.part(self._schemas[-1], key)
        self._pass_on(f'{self._comma()}"{quoted(key)}": ')
        # The comma is that of the key.
        self._filled[-1] = False
        return self._go(match.end(), self._item)

    def _item(self) -> bool:
        """Parse a value, or the end of a list."""
        if self._open[-1] == "[" and (match := _CLOSE.match(self._held)):
            return self._leave(match["bracket"], match.end())
        if self._open[-1] == "[":
            self._schema = self._references.part(self._schemas[-1], None)
        if match := _OPEN.match(self._held):
            self._pass_on(self._comma())
            return self._enter(match["bracket"], match.end())
        match = _STRING.match(self._held, partial=True)
        if match and not match.partial:
            self._pass_on(self._comma())
            if "string" not in self._types:
                return self._go(match.end(), self._other_string)
            self._pass_on('"')
            return self._go(match.end(), self._string)
        return self._other_value(match)

    @property
    def _types(self) -> frozenset[str]:
        """The types that the schema allows for the value; those that the notation has if it names none."""
        return self._references.named(self._schema) or _STRING_ONLY

    def _other_value(self, match: regex.Match[str] | None) -> bool:
        """Parse a value that is not between tags. ``match``: it may become one that is."""
        may_be_empty = self._open[-1] == "{" and "string" in self._references.named(self._schema)
        if may_be_empty and (empty := _NO_VALUE.match(self._held)):
            self._pass_on(f'{self._comma()}""')
            return self._go(empty.end(), self._next)
        longest = LONGEST_EARLY
        if match is None:
            match = _QUOTED.match(self._held, partial=True)
        if match is None or match.end() > longest:
            match, longest = _BARE.match(self._held, partial=True), LONGEST_HEAD
        if match is None or match.end() > longest:
            return self._break_off()
        if match.partial:
            return False
        value = match["value"].rstrip()
        text = _unquoted(value)
        types = self._references.named(self._schema) or (_OTHER_TYPES if text == value else _STRING_ONLY)
        self._pass_on(self._comma() + as_json(text, types))
        return self._go(match.end(), self._next)

    def _other_string(self) -> bool:
        """A string where the schema allows none."""
        at = self._held.find(QUOTE, 0, LONGEST_EARLY)
        if at >= 0:
            self._pass_on(as_json(self._held[:at], self._types))
            return self._go(at + len(QUOTE), self._next)
        if len(self._held) < LONGEST_EARLY:
            return False
        self._pass_on('"')
        return self._go(0, self._string)

    def _string(self) -> bool:
        at = self._held.find(QUOTE)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, QUOTE)
        self._pass_on(quoted(self._held[:end]))
        if at < 0:
            self._held = self._held[end:]
            return False
        self._pass_on('"')
        return self._go(at + len(QUOTE), self._next)

    def _next(self) -> bool:
        """Parse what follows a value."""
        if match := _CLOSE.match(self._held):
            return self._leave(match["bracket"], match.end())
        if len(self._open) == 1 and (match := self._matched(self.end)):
            # The closing tag shows that a bracket is missing.
            return not match.partial and self._leave("}", 0)
        following = self._key if self._open[-1] == "{" else self._item
        return self._take(_COMMA, following, otherwise=self._break_off)

    def _break_off(self) -> bool:
        """End arguments that the text cannot continue."""
        self._broken = True
        return self._go(0, self._tail)

    def _enter(self, bracket: str, upto: int) -> bool:
        self._open.append(bracket)
        self._filled.append(False)
        self._schemas.append(self._schema)
        self._pass_on(bracket)
        return self._go(upto, self._key if bracket == "{" else self._item)

    def _leave(self, bracket: str, upto: int) -> bool:
        if bracket != _BRACKETS[self._open[-1]]:
            return self._break_off()
        self._open.pop()
        self._filled.pop()
        self._schemas.pop()
        self._pass_on(bracket)
        return self._go(upto, self._next if self._open else self._tail)

    def _comma(self) -> str:
        """The comma before a key or a value of a list, if one is needed."""
        before = ", " if self._filled[-1] else ""
        self._filled[-1] = True
        return before


# -- the grammar of arguments ---------------------------------------------------------------------------


def _arguments_form(schema: Mapping[str, Any], rules: Rules) -> str:
    """The arguments of a function; an object's properties come in the order of its schema, or are any if that
    lists none. Raises ValueError for a schema that cannot be written."""
    try:
        return _Values(schema, rules).arguments()
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _Values:
    """Writes the forms of values."""

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


def _unquoted(text: str) -> str:
    """The text between quotation marks of JSON or Python, if it is."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "\"'":
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def _joined(forms: list[str]) -> list[str]:
    return [part for at, form in enumerate(forms) for part in ('","', form)[not at :]]


def _checked(name: Any) -> str:
    """A key that needs no quotation marks."""
    if not isinstance(name, str) or not _BARE_NAME.fullmatch(name):
        raise ValueError(f"has the property {name!r}, which calls of this format cannot express")
    return name
