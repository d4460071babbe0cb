"""Calls in Python's notation: the formats of LFM2 and of Llama's "pythonic" templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.base import LONGEST_HEAD, Functions, ToolCallParser
from aioinfer.text.tool_calls.json_calls import JsonCalls
from aioinfer.text.tool_calls.python_literals import literal, unescaped
from aioinfer.text.tool_calls.raw_values import References, parameters_of, quoted

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Lfm2", "Pythonic"]

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_WORD = r"""[^\s()\[\]{}=,;:"'<>]++"""
_ARGUMENT = rf"(?P<key>{_WORD})\s*+=(?!=)"
#: a call up to its arguments, which have names
_CALL = rf"""(?P<name>[^\s()\[\]{{}}=,;"'<>]++)\s*+\(\s*+(?=\)|{_ARGUMENT})"""
_FIRST_ARGUMENT = regex.compile(rf"\s*+(?:{_ARGUMENT}|(?P<close>\)))")
_TEXT = r"""(?P<quote>["'])(?P<text>(?:[^"'\\]|\\.|(?!(?P=quote))["'])*+)(?P=quote)"""
#: what may be a key of a dict, and what shows that it is one
_FIRST = regex.compile(rf"\s*+\{{\s*+(?:\}}|(?:{_TEXT}|{_WORD})\s*+(?P<after>[:,}}]))", regex.DOTALL)
_KEY = regex.compile(rf"\s*+(?:{_TEXT}|(?P<bare>{_WORD}))\s*+:", regex.DOTALL)
_OPEN = regex.compile(r"\s*+[\[(]")
_CLOSE = regex.compile(r"\s*+[\])}]")
_COMMA = regex.compile(r"\s*+,")
_QUOTE = regex.compile(r"""\s*+(?:(?P<long>"{3}|'{3})|["'](?=[^"'])|""(?=[^"])|''(?=[^'])|"(?=')|'(?="))""")
_BARE = regex.compile(r"""\s*+(?P<value>[^\s,()\[\]{}"'<>=][^,()\[\]{}"'<>=]*+)(?=[,)\]}])""")
#: a quotation mark that ends a string: models do not escape all of those within one
_QUOTE_END = {each: regex.compile(rf"{each}(?=\s{{0,64}}+[,)\]}}:])") for each in ("'", '"')}
_LONG_END = {each * 3: regex.compile(each * 3) for each in ("'", '"')}
_SPECIAL = regex.compile(r"""["'\\]""")
#: bracket -> how it is closed, and what stands for it in JSON
_LISTS = {"[": ("]", "[", "]"), "(": (")", "[", "]")}
_DEFINITIONS = ("$defs", "definitions", "$schema", "$id")


class PythonCalls(ToolCallParser):
    """``[f(a=1, b="x"), g()]``: values are literals of Python or JSON, bare words are strings.

    A quotation mark that nothing follows which may follow a string is part of it. A tuple or a set becomes a
    list. Calls whose arguments have no names are none.

    Attributes:
        begin: the expression for what precedes the first call.
        closing: the tag after calls.
    """

    begin: ClassVar[str]
    closing: ClassVar[str]
    _first_call: ClassVar[regex.Pattern[str]]
    _next_call: ClassVar[regex.Pattern[str]] = regex.compile(rf"[\s,;]*+{_CALL}")
    _over: ClassVar[regex.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._first_call = regex.compile(rf"{cls.begin}\s*+{_CALL}")
        cls._over = regex.compile(rf"\s*+(?:\]\s*+)?+{regex.escape(cls.closing)}")

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        #: the brackets that are open: how they are closed in Python and in JSON
        self._open_brackets: list[tuple[str, str]] = []
        #: there is a value within each
        self._filled: list[bool] = []
        #: the names of the call's arguments
        self._names: set[str] = set()
        self._quote = ""
        #: nothing was parsed behind the call
        self._adjacent = False

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return f"{rules.text(f'{function}(')} {_arguments_form(schema, rules)} {rules.text(')')}"

    @property
    def unfinished(self) -> bool:
        within = (self._argument, self._pair, self._item, self._string, self._following)
        return self._broken or self._state in within or super().unfinished

    def _end(self) -> None:
        # What is cut off is incomplete JSON.
        if self._state == self._item and (cut := self._held.strip()):
            self._pass_on(self._comma() + cut)
        elif self._state == self._string:
            self._pass_on(quoted(self._held))
        elif self._state == self._beyond and not self._over.match(self._held, partial=True):
            self._out.content += self._held
        super()._end()

    # -- states ----------------------------------------------------------------------------------------

    def _head(self) -> bool:
        match = self._matched(self._first_call)
        if match is None:
            return self._no_python()
        return not match.partial and self._begin_call(match)

    def _no_python(self) -> bool:
        return self._no_call()

    def _begin_call(self, match: regex.Match[str]) -> bool:
        self._begin(match["name"])
        self._open_brackets, self._filled, self._names = [], [], set()
        return self._enter((")", "{", "}"), match.end(), self._argument)

    def _argument(self) -> bool:
        """Parse the name of an argument, or the end of a call."""
        match = self._matched(_FIRST_ARGUMENT)
        if match is None:
            return self._break_off()
        if match.partial:
            return False
        if match["close"]:
            return self._leave(")", match.end())
        self._broken |= match["key"] in self._names
        self._names.add(match["key"])
        return self._named(match["key"], match.end())

    def _pair(self) -> bool:
        """Parse a key of a dict, or its end."""
        if match := self._bracket():
            return self._leave(match[0][-1], match.end())
        match = self._matched(_KEY)
        if match is None:
            return self._break_off()
        if match.partial:
            return False
        text = match["text"]
        return self._named(match["bare"] if text is None else text, match.end())

    def _named(self, key: str, upto: int) -> bool:
        self._pass_on(f'{self._comma()}"{_written(key)}": ')
        # The comma is that of the key.
        self._filled[-1] = False
        return self._go(upto, self._item)

    def _item(self) -> bool:
        """Parse a value, or the end of a list."""
        if self._open_brackets[-1][1] == "]" and (match := self._bracket()):
            return self._leave(match[0][-1], match.end())
        if (match := _OPEN.match(self._held)) and match.end() <= LONGEST_HEAD:
            self._pass_on(self._comma())
            return self._enter(_LISTS[match[0][-1]], match.end(), self._item)
        for pattern, parse in ((_FIRST, self._dict), (_QUOTE, self._begin_string), (_BARE, self._bare)):
            match = self._matched(pattern)
            if match is not None:
                return not match.partial and parse(match)
        return self._break_off()

    def _dict(self, match: regex.Match[str]) -> bool:
        self._pass_on(self._comma())
        upto = match[0].index("{") + 1
        if match["after"] in (",", "}"):
            return self._enter(("}", "[", "]"), upto, self._item)
        return self._enter(("}", "{", "}"), upto, self._pair)

    def _begin_string(self, match: regex.Match[str]) -> bool:
        self._quote = match["long"] or match[0].lstrip()[0]
        self._pass_on(f'{self._comma()}"')
        return self._go(len(match[0]) - len(match[0].lstrip()) + len(self._quote), self._string)

    def _bare(self, match: regex.Match[str]) -> bool:
        self._pass_on(self._comma() + literal(match["value"].rstrip()))
        return self._go(match.end(), self._following)

    def _string(self) -> bool:
        """Parse the text of a string."""
        ends = (_QUOTE_END | _LONG_END)[self._quote]
        while found := _SPECIAL.search(self._held):
            at = found.start()
            self._pass_on(quoted(self._held[:at]))
            self._held = self._held[at:]
            if found[0] == "\\":
                if (escape := unescaped(self._held[:10])) is None:
                    return False
                self._pass_on(escape[0])
                self._held = self._held[escape[1] :]
                continue
            end = ends.match(self._held, partial=True)
            if end and not end.partial:
                self._pass_on('"')
                return self._go(len(self._quote), self._following)
            if end:
                return False
            self._pass_on(quoted(found[0]))
            self._held = self._held[1:]
        self._pass_on(quoted(self._held))
        self._held = ""
        return False

    def _following(self) -> bool:
        """Parse what follows a value."""
        if match := self._bracket():
            return self._leave(match[0][-1], match.end())
        closing, json_closing = self._open_brackets[-1]
        keyed = self._argument if closing == ")" else self._pair
        following = keyed if json_closing == "}" else self._item
        return self._take(_COMMA, following, otherwise=self._break_off)

    def _beyond(self) -> bool:
        """Parse what follows a call."""
        if not self._held:
            return False
        # What is next to a call was to be a part of it.
        self._broken |= self._adjacent and self._held[0] not in ",;]<" and not self._held[0].isspace()
        self._adjacent = False
        match = self._matched(self._next_call)
        if match is not None:
            return not match.partial and self._begin_call(match)
        return self._take(self._over, self._gap, otherwise=self._unclosed)

    def _unclosed(self) -> bool:
        upto = match.end() if (match := _CLOSE.match(self._held)) and match[0][-1] == "]" else 0
        return self._go(upto, self._gap)

    def _break_off(self) -> bool:
        """End arguments that the text cannot continue."""
        self._broken = True
        self._adjacent = False
        return self._go(0, self._beyond)

    # -- parts -----------------------------------------------------------------------------------------

    def _bracket(self) -> regex.Match[str] | None:
        match = _CLOSE.match(self._held)
        return match if match and match.end() <= LONGEST_HEAD else None

    def _enter(self, bracket: tuple[str, str, str], upto: int, state: Any) -> bool:
        closing, json_opening, json_closing = bracket
        self._open_brackets.append((closing, json_closing))
        self._filled.append(False)
        self._pass_on(json_opening)
        return self._go(upto, state)

    def _leave(self, bracket: str, upto: int) -> bool:
        if bracket != self._open_brackets[-1][0]:
            return self._break_off()
        _, closing = self._open_brackets.pop()
        self._filled.pop()
        self._pass_on(closing)
        self._adjacent = not self._open_brackets
        return self._go(upto, self._following if self._open_brackets else self._beyond)

    def _comma(self) -> str:
        """The comma before a key or a value of a list, if one is needed."""
        before = ", " if self._filled[-1] else ""
        self._filled[-1] = True
        return before


def _written(text: str) -> str:
    """The part of a JSON string for the text between quotation marks."""
    parts: list[str] = []
    while (at := text.find("\\")) >= 0:
        escape = unescaped(text[at : at + 10] + " ")
        assert escape is not None
        parts += quoted(text[:at]), escape[0]
        text = text[at + escape[1] :]
    return "".join(parts) + quoted(text)


class Lfm2(PythonCalls, JsonCalls):
    """``<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>``: LFM2 and LFM2.5.

    Reads JSON between the tags as well, which the models write if they are told to.
    """

    name: ClassVar[str] = "lfm2"
    opening = _START
    closing = _END
    begin = r"\s*+(?:\[\s*+)?+"
    separator: ClassVar[str | None] = ""
    tags: ClassVar[tuple[str, ...]] = (_START, _END)

    @staticmethod
    def in_template(template: str) -> bool:
        listed = "List of tools: [" in template or "<|tool_list_start|>" in template
        return _START in template or listed

    @classmethod
    def group(cls, call: str, most: int, rules: Rules) -> str:
        return f"{_list_form(call, most)} {rules.tag(_END)}"

    def _no_python(self) -> bool:
        return JsonCalls._head(self)


class Pythonic(PythonCalls):
    """``[f(a=1, b="x"), g()]`` as the whole answer: Llama 3.2 and 4, Gemma 3 and ToolACE with such templates.

    The beginning of the answer decides: what does not begin with a call is content to its end.
    """

    name: ClassVar[str] = "pythonic"
    closing = _PYTHON_END
    begin = rf"\s*+(?:{regex.escape(_PYTHON_START)}\s*+)?+\["
    tags: ClassVar[tuple[str, ...]] = (_PYTHON_START, _PYTHON_END)

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._state = self._head

    @staticmethod
    def in_template(template: str) -> bool:
        return "[func_name1(" in template

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return _list_form(call, most)

    @staticmethod
    def called(functions: Iterable[str]) -> str:
        # The bracket alone may begin a text, too, and the grammar's lexer decides there.
        raise ValueError("cannot be strict next to text in the format pythonic: require a call")

    def _text(self) -> bool:
        self._out.content += self._held
        self._held = ""
        return False


# -- the grammar of arguments ---------------------------------------------------------------------------


def _list_form(call: str, most: int) -> str:
    more = f' (", " {call}){{0,{most - 1}}}' if most > 1 else ""
    return f'"[" {call}{more} "]"'


def _arguments_form(schema: Mapping[str, Any], rules: Rules) -> str:
    """The arguments of a function in the order of its schema, or any if that lists none: JSON, which is what
    these models write but for quotation marks and names. Raises ValueError for what cannot be written."""
    defined = {key: schema[key] for key in _DEFINITIONS if key in schema}
    schema = References(schema).resolved(schema)

    def value(form: Any) -> str:
        if form is False:
            raise ValueError("has a property that allows nothing")
        if form is not True and not isinstance(form, Mapping):
            raise ValueError("has a property that is not a schema")
        if form is not True and '"$ref"' in json.dumps(form):
            form = {**defined, **form}
        return rules.json({} if form is True else form)

    names, needed = parameters_of(schema)
    if not names:
        more = schema.get("additionalProperties", True)
        pair = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {value(more)}' if more is not False else ""
        return f'({pair} (", " {pair})*)?' if pair else '""'
    # From the last property to the first: what may follow with and without an argument in front.
    first, further = '""', '""'
    for name, form in reversed(names.items()):
        if not isinstance(name, str) or not regex.fullmatch(_WORD, name):
            raise ValueError(f"has the property {name!r}, which calls of this format cannot express")
        with_it = f"{rules.text(f'{name}=')} {value(form)} {further}"
        skipped = name not in needed
        first = rules.shared("rest", f"{with_it} | {first}" if skipped else with_it)
        with_it = f'", " {with_it}'
        further = rules.shared("rest", f"{with_it} | {further}" if skipped else with_it)
    return first
