"""Calls as tags with raw values between them: what the formats of this kind have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tags import partial_length
from aioinfer.text.tool_calls.base import LONGEST_EARLY, Functions, ToolCallParser
from aioinfer.text.tool_calls.raw_values import LIST_LIKE, Literal, Signatures, as_json, quoted
from aioinfer.text.tool_calls.tagged_form import Frame, call_form

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Frame", "TaggedCalls"]

#: white space where models may write any: bounded, since what may be a tag is held back
_MOST_SPACE = 64
_SPACE = rf"\s{{0,{_MOST_SPACE}}}+"
_NAME = r"""["']?+(?P<name>[^<>\s"'=]++)["']?+"""
_KEY = r"""["']?+(?P<key>[^<>\n"'=]{1,256}+)["']?+"""
_STRING = frozenset({"string"})
_NO_STRING = frozenset({"integer", "number", "boolean", "null", "array", "object"})


class _Patterns:
    """What the parser of a format looks for."""

    def __init__(self, frame: Frame, opening: str, closing: str) -> None:
        before_name, after_name = map(_loose, frame.function)
        before_key, after_key = map(_loose, frame.key)
        call_end = regex.escape(closing)
        function_end = _loose(frame.function_end) or "(?!)"
        kind = rf"""(?:{frame.attribute or "(?!)"}={_SPACE}["']?+(?P<string>true|false)["']?+{_SPACE})?+"""
        parameter = f"{before_key}{_SPACE}{_KEY}{_SPACE}{kind}{after_key}"
        over = f"{function_end}(?:{_SPACE}{call_end})?+" if frame.function_end else call_end
        head = rf"{_NAME}{after_name}{_SPACE}"
        follows = rf"(?=(?P<parameter>{before_key})|{function_end}|{call_end})"
        another = regex.escape(opening) + (f"|{before_name}" if frame.function[0] else "")
        value_tag = frame.value_closing.strip("</>")
        #: models repeat the key in the tag
        value_end = rf"<\s?/\s?{value_tag}\s?(?:=[^<>\n]{{0,64}}+)?+>"
        #: the texts that a call begins with
        bare = frame.function[0].strip().rstrip("\"'")
        self.openings = (opening, bare) if bare else (opening,)
        #: the head of a call behind its tag; the text after it shows that it is one
        self.head = regex.compile(rf"{_SPACE}{before_name}{head}{follows}")
        #: the same without the tag
        self.bare_head = regex.compile(head + follows)
        #: what follows a value: the next one, or the end of the call, which may lack its tags
        self.between = regex.compile(
            rf"{_SPACE}(?:{parameter}|(?P<over>{function_end})|(?P<closed>(?={call_end}))|(?={another}))"
        )
        #: a key that the end of the output cuts off
        self.key_begin = regex.compile(rf"{_SPACE}{before_key}{_SPACE}{_KEY}")
        self.value_end = regex.compile(rf"{_SPACE}{value_end}")
        #: the end of a value: its tag; without that, the next parameter or the end of the call
        self.stop = regex.compile(rf"(?P<tag>{value_end})|{parameter}|{over}{_SPACE}(?:{another})")
        firsts = {tag.lstrip("<\\/")[0] for tag in (before_key, value_tag, over)}
        #: what may be one, to pass over other tags
        self.near_stop = regex.compile(rf"<\s?+/?+\s?+(?:[{''.join(sorted(firsts))}]|\Z)")
        #: the end of a call, within a value, at the end of the output
        self.over = regex.compile(rf"{over}{_SPACE}")
        #: a value that ends so without its closing tag had one, which is damaged
        tail = rf"<\s?/[^<>]*+>?+|<\s?{value_tag[:3]}[^<>]*+>?+|{value_tag}>"
        self.damaged = regex.compile(rf"(?:{tail})\s*+\Z")
        #: a parameter can begin within a line of a value: it has two tags
        self.inline = "<" in frame.key[1]


class TaggedCalls(ToolCallParser):
    """Calls whose parameters are raw text between tags.

    A call is one from its first parameter or its end on; without the opening tag in front, or without
    parameters, its function must be known. As in vLLM and SGLang, a value is a string unless the function's
    schema names another type for it, or has ``properties`` or ``items``: then it is JSON, or a string if it
    cannot be or is longer than 16 Ki characters. Where a schema allows strings and other types, text that is
    JSON of such another type is of that type. Elsewhere lists, objects and constants may be in Python's
    notation.

    Strings are passed on as they arrive. What begins like a list or an object where strings are not allowed
    is kept until it is whole, up to 16 Ki characters, and passed on as it arrives from there on.

    A value ends at its closing tag, whatever other tags it has. Without that it ends in front of the next
    parameter (for a string: one that the schema names and that begins a line) or of the end of the call. A
    call stays unfinished that has anything else between its parameters, or a parameter twice, or a string
    that may or may not go on.

    Attributes:
        closing: the tag after calls.
        frame: the text between the tags.
    """

    closing: ClassVar[str]
    frame: ClassVar[Frame]
    reads_schemas: ClassVar[bool] = True
    #: a line break next to a value belongs to its tags
    _padded: ClassVar[bool]
    _patterns: ClassVar[_Patterns]

    def __init_subclass__(cls) -> None:
        cls._padded = cls.frame.value_end.startswith("\n")
        cls._patterns = _Patterns(cls.frame, cls.opening, cls.closing)
        cls.end = regex.compile(rf"{_SPACE}{regex.escape(cls.closing)}")
        cls.tags = (cls.frame.mark,) if cls.frame.mark else (cls.opening, cls.closing)

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._signatures = functions if isinstance(functions, Signatures) else Signatures(functions or {})
        self._function = ""
        self._types = _STRING
        #: the keys of the call
        self._given: set[str] = set()
        #: a string of the call has no closing tag
        self._unclosed = False
        #: the value's tag ends its line
        self._on_lines = False
        self._list = Literal()
        #: the part of the held value that is searched already, and whether it is passed on as it arrives
        self._searched, self._raw = 0, False
        #: the end of the text that is passed on of a value
        self._last = ""
        #: a value has the tag of a parameter or no tag behind it, and the content since then ends so
        self._nested = False
        self._behind = ""

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return f"{call_form(function, schema, cls.frame, rules)} {rules.tag(cls.closing)}"

    @property
    def openings(self) -> tuple[str, ...]:
        return self._patterns.openings

    @property
    def unfinished(self) -> bool:
        return self._broken or self._state in (self._parameters, self._value_begin, *self._values)

    @property
    def _values(self) -> tuple[Any, ...]:
        return self._string, self._whole_value, self._literal, self._value_end

    def _end(self) -> None:
        if self._state in (self._string, self._whole_value):
            self._end_value()
        elif self._state == self._literal:
            self._pass_on(self._held.rstrip())
        elif self._state == self._parameters and (match := self._patterns.key_begin.match(self._held)):
            self._pass_on(f'{self._separator}"{quoted(match["key"])}')
        super()._end()

    def _end_value(self) -> None:
        """A value at the end of the output: a call may be over without the tag of its last value."""
        at = self._held.find("<", self._searched)
        while at >= 0 and not self._patterns.over.fullmatch(self._held, at):
            at = self._held.find("<", at + 1)
        if at >= 0:
            self._close(self._held[: self._line_before(at)], closed=False)
            self._pass_on("}")
            self._go(len(self._held), self._tail)
            return
        # It is incomplete JSON.
        closing = self.frame.value_closing
        cut = self._held[: len(self._held) - partial_length(self._held, closing)]
        self._pass_on(cut.strip() if self._state == self._whole_value else quoted(cut.removesuffix("\n")))

    # -- states ----------------------------------------------------------------------------------------

    def _text(self) -> bool:
        before = len(self._out.content)
        more = super()._text()
        if self._nested:
            # A tag that closes nothing: the value with a tag in it may have been longer.
            closing = self.frame.value_closing
            self._behind += self._out.content[before:]
            self._broken |= closing in self._behind
            self._behind = self._behind[-len(closing) :]
        return more

    def _head(self) -> bool:
        bare = not self._tentative.endswith(self.opening)
        match = self._matched(self._patterns.bare_head if bare else self._patterns.head)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        if not self._sure(match, bare):
            return self._no_call()
        self._function = match["name"]
        self._begin(self._function)
        self._given, self._unclosed = set(), False
        return self._go(match.end(), self._parameters)

    def _sure(self, match: regex.Match[str], bare: bool) -> bool:
        """It is a call, and no text about calls: by its tags, or by the name of a function."""
        tags = not bare and match["parameter"] is not None
        return tags or not self._functions or match["name"] in self._functions

    @property
    def _separator(self) -> str:
        """The JSON before the next key."""
        return ", " if self._given else "{"

    def _parameters(self) -> bool:
        """Between values."""
        match = self._patterns.between.match(self._held, partial=True)
        if match is None:
            return self._break_off()
        if match.partial:
            return False
        key = match["key"]
        if key is None:
            if not (self._given or match["over"] or match["closed"] is not None):
                return self._break_off()
            self._pass_on("}" if self._given else "{}")
            return self._go(match.end(), self._tail)
        key = key.strip()
        self._types = self._signatures.types_of(self._function, key)
        if match["string"]:
            self._types = _STRING if match["string"] == "true" else (self._types - _STRING or _NO_STRING)
        quote = '"' if self._types == _STRING else ""
        self._pass_on(f'{self._separator}"{quoted(key)}": {quote}')
        self._broken |= key in self._given
        self._given.add(key)
        return self._go(match.end(), self._value_begin)

    def _break_off(self) -> bool:
        """End arguments that the text cannot continue: they are no JSON."""
        self._broken = True
        self._pass_on("" if self._given else "{")
        return self._go(0, self._tail)

    def _value_begin(self) -> bool:
        """Find out how the value is to be read."""
        start = self._held.lstrip()
        near = len(self._held) - len(start) <= LONGEST_EARLY
        if not self._held or (self._types != _STRING and near and not start):
            return False
        self._on_lines = self._padded and self._held[0] == "\n"
        self._searched, self._raw, self._last = 0, False, ""
        state = self._string if self._types == _STRING else self._whole_value
        if near and "string" not in self._types and start[:1] in LIST_LIKE:
            self._list = Literal()
            state = self._literal
        return self._go(int(self._on_lines), state)

    def _stop(self) -> tuple[int, regex.Match[str] | None]:
        """The end of the held text that belongs to the value, and what ends the value, if anything does."""
        at = self._searched
        while near := self._patterns.near_stop.search(self._held, at):
            at = near.start()
            match = self._patterns.stop.match(self._held, at, partial=True)
            if match and not match.partial and match["tag"]:
                return at - int(self._padded and self._held[at - 1 : at] == "\n"), match
            if match:
                line = self._line_before(at)
                if match.partial:
                    return line, None
                begins_line = line < at or not (at or self._last)
                if match["key"] is None or self._ends(match["key"].strip(), begins_line):
                    return line, match
            at += 1
        return self._line_before(len(self._held)), None

    def _line_before(self, end: int) -> int:
        """The beginning of the white space in front of a tag, from a line break on: it belongs to the tag."""
        near = self._held[max(0, end - _MOST_SPACE) : end]
        space = near[len(near.rstrip()) :]
        breaks = space.find("\n")
        return end if breaks < 0 else end - len(space) + breaks

    def _ends(self, key: str, begins_line: bool) -> bool:
        """The tag of a parameter ends the value in front of it."""
        if "string" not in self._types:
            return True
        self._nested = True
        if not self._signatures.declares(self._function, key):
            return False
        if self._patterns.inline or begins_line:
            return True
        if self._on_lines:
            return False
        # Where tags are within lines, the closing tag may be missing: a number behind it would show that.
        shown = "string" not in self._signatures.types_of(self._function, key)
        self._broken |= not shown
        return shown

    def _string(self) -> bool:
        upto, stop = self._stop()
        if stop is None:
            self._pass_on(quoted(self._held[:upto]))
            self._last = (self._last + self._held[:upto])[-_MOST_SPACE:]
            self._held = self._held[upto:]
            return False
        self._close(self._held[:upto], closed=bool(stop["tag"]))
        return self._go(stop.end() if stop["tag"] else upto, self._parameters)

    def _whole_value(self) -> bool:
        """A value of another type than a string, or maybe so."""
        upto, stop = self._stop()
        if upto > LONGEST_EARLY:
            self._pass_on('"')
            self._searched = 0
            return self._go(0, self._string)
        if stop is None:
            self._searched = upto
            return False
        self._close(self._held[:upto], closed=bool(stop["tag"]))
        return self._go(stop.end() if stop["tag"] else upto, self._parameters)

    def _close(self, value: str, *, closed: bool) -> None:
        """Pass on the rest of a value, which has its closing tag or not."""
        damaged = bool(self._patterns.damaged.search((self._last + value)[-_MOST_SPACE:]))
        self._broken |= damaged and not closed
        told = f'{quoted(value)}"' if self._state == self._string else as_json(value, self._types)
        if self._state != self._string and "string" not in self._types and told.startswith('"'):
            # It is no value of this type: perhaps for a tag in it, or in front of it.
            self._broken |= damaged or "<" in value or self._unclosed
        if not closed and "string" in self._types:
            self._unclosed = self._nested = True
        self._pass_on(told)

    def _literal(self) -> bool:
        """A list or an object."""
        end = self._list.end(self._held[self._searched :])
        upto = len(self._held) if end is None else self._searched + end
        self._raw |= upto > LONGEST_EARLY
        if end is None and not self._raw:
            self._searched = upto
            return False
        text, whole = self._held[:upto], self._list.complete
        if whole and not self._raw:
            text = as_json(text, self._types)
            whole = not text.startswith('"')
        self._pass_on(text)
        self._searched = 0
        if end is None:
            self._held = ""
            return False
        self._broken |= not whole or (self._raw and self._list.foreign)
        return self._go(upto, self._value_end)

    def _value_end(self) -> bool:
        return self._take(
            self._patterns.value_end, self._parameters, otherwise=lambda: self._go(0, self._parameters)
        )


def _loose(text: str) -> str:
    """The expression for a text with any white space, and quotation marks or none at its ends."""
    parts = text.strip().strip("\"'").split("\n")
    return _SPACE.join(map(regex.escape, parts))
