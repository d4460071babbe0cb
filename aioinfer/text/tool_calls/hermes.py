"""Calls as JSON between tags: the format of the Hermes and Qwen models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar

import regex

from aioinfer.text.tags import partial_length, without_breaks
from aioinfer.text.tool_calls.base import Parsed, ToolCallDelta, WrittenCall, new_id

__all__ = ["Hermes"]

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_NAME = r'"name"\s*+:\s*+(?P<name>"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++")\s*+'
_ARGUMENTS = r'"arguments"\s*+:\s*+(?=\{)'
#: the usual order: arguments are passed on as they arrive
_NAME_FIRST = regex.compile(rf"\s*+\{{\s*+{_NAME},\s*+{_ARGUMENTS}")
#: the order of the first Hermes models: the function is known behind its arguments
_ARGUMENTS_FIRST = regex.compile(rf"\s*+\{{\s*+{_ARGUMENTS}")
_NAME_LAST = regex.compile(rf"\s*+,\s*+{_NAME}\}}\s*+{_CLOSING}")
#: the brace is optional: models omit it
_END = regex.compile(rf"\s*+(?:\}}\s*+)?{_CLOSING}")
#: A text that turns out not to be a call is parsed again. Limits in characters: before and behind the
#: arguments, and of arguments before the name.
_LONGEST_HEAD, _LONGEST_EARLY = 1024, 16_384


class Hermes:
    r"""``<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>``: Hermes, Qwen 2.5, Qwen 3.

    Line breaks around a call belong to it. An output that ends inside the closing tag completes the call.
    """

    name: ClassVar[str] = "hermes"

    def __init__(self) -> None:
        self._count = 0
        self._out = Parsed()
        #: not parsed yet
        self._held = ""
        #: the parsed part of a possible call; content if it is not one
        self._tentative = ""
        #: where the arguments begin in ``_tentative``, if the name follows them
        self._from = 0
        self._value = _JsonObject()
        #: parses a part of ``_held``; returns False if it needs more text
        self._state: Callable[[], bool] = self._text

    @staticmethod
    def in_template(template: str) -> bool:
        # Others have something else than JSON between the same tags.
        return _OPENING in template and all(f'"{key}"' in template for key in ("name", "arguments"))

    @staticmethod
    def write(function: str) -> WrittenCall:
        before = f'\n{{"name": {json.dumps(function)}, "arguments": '
        return WrittenCall(_OPENING, before, "}\n", _CLOSING)

    def push(self, text: str) -> Parsed:
        self._held += text
        while self._state():
            pass
        out, self._out = self._out, Parsed()
        return out

    def finish(self) -> Parsed:
        while self._state in (self._head, self._early_arguments, self._late_name):
            # Not a call, but the text behind its tag can contain one.
            self._no_call()
            while self._state():
                pass
        if self._state == self._text:
            self._out.content += self._held
        self._held = ""
        return self.push("")

    @property
    def unfinished(self) -> bool:
        return self._state == self._arguments

    def _text(self) -> bool:
        """Outside calls."""
        at = self._held.find(_OPENING)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, _OPENING)
        content = without_breaks(self._held[:end])
        self._out.content += content
        if at < 0:
            self._held = self._held[len(content) :]
            return False
        self._tentative = self._held[len(content) : at + len(_OPENING)]
        return self._go(at + len(_OPENING), self._head)

    def _head(self) -> bool:
        """Behind the opening tag: the name, or the arguments before it."""
        usual = _NAME_FIRST.match(self._held, partial=True)
        match = usual or _ARGUMENTS_FIRST.match(self._held, partial=True)
        if match is None or match.end() > _LONGEST_HEAD:
            return self._no_call()
        if match.partial:
            return False
        if usual:
            self._begin(usual["name"])
            return self._go(usual.end(), self._arguments)
        self._value = _JsonObject()
        self._tentative += self._held[: match.end()]
        self._from = len(self._tentative)
        return self._go(match.end(), self._early_arguments)

    def _arguments(self) -> bool:
        end = self._value.end(self._held)
        upto = len(self._held) if end is None else end
        if upto:
            self._out.calls.append(ToolCallDelta(self._count - 1, arguments=self._held[:upto]))
        return self._go(upto, self._arguments if end is None else self._tail) and end is not None

    def _tail(self) -> bool:
        """Behind the arguments. Text that is not the end of the call is content."""
        match = _END.match(self._held, partial=True)
        if match is None or match.end() > _LONGEST_HEAD:
            return self._go(0, self._text)
        return not match.partial and self._go(match.end(), self._gap)

    def _gap(self) -> bool:
        """Behind a call."""
        self._held = self._held.lstrip("\n")
        return bool(self._held) and self._go(0, self._text)

    def _early_arguments(self) -> bool:
        """Arguments of a call whose name is not known yet."""
        end = self._value.end(self._held)
        upto = len(self._held) if end is None else end
        self._tentative += self._held[:upto]
        self._go(upto, self._early_arguments if end is None else self._late_name)
        if len(self._tentative) - self._from > _LONGEST_EARLY:
            return self._no_call()
        return end is not None

    def _late_name(self) -> bool:
        match = _NAME_LAST.match(self._held, partial=True)
        if match is None or match.end() > _LONGEST_HEAD:
            return self._no_call()
        if match.partial:
            return False
        self._begin(match["name"])
        arguments = self._tentative[self._from :]
        self._out.calls.append(ToolCallDelta(self._count - 1, arguments=arguments))
        return self._go(match.end(), self._gap)

    def _begin(self, name: str) -> None:
        self._out.calls.append(ToolCallDelta(self._count, new_id(), json.loads(name)))
        self._count += 1
        self._value = _JsonObject()

    def _no_call(self) -> bool:
        """The tag is content, and the text behind it is parsed again."""
        tag = self._tentative.index(_OPENING) + len(_OPENING)
        self._out.content += self._tentative[:tag]
        self._held = self._tentative[tag:] + self._held
        return self._go(0, self._text)

    def _go(self, upto: int, state: Callable[[], bool]) -> bool:
        self._held = self._held[upto:]
        self._state = state
        return True


class _JsonObject:
    """Finds the end of a JSON object that arrives in pieces, without validating it."""

    _IN_STRING = regex.compile(r'["\\]')
    _OUTSIDE = regex.compile(r'["{}\[\]<]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Where the object ends in the next piece, or None if it continues. A ``<`` outside strings, which is
        not JSON, also ends it: it can be a closing tag."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while found := (self._IN_STRING if self._in_string else self._OUTSIDE).search(text, at):
            at = int(found.end())
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case "<":
                    return at - 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        return at
        return None
