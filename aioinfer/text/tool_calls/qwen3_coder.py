"""Calls as tags with the arguments between them: the format of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tags import partial_length
from aioinfer.text.tool_calls.base import Functions
from aioinfer.text.tool_calls.qwen3_coder_grammar import parameters_form
from aioinfer.text.tool_calls.raw_values import Signatures, as_json, quoted
from aioinfer.text.tool_calls.states import LONGEST_EARLY, LONGEST_HEAD, CallStates, JsonObject

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Qwen3Coder"]

_CLOSING, _VALUE_CLOSING = "</tool_call>", "</parameter>"
_FUNCTION = regex.compile(r'\s*+<function=(?P<name>[^<>\s"]++)>')
_PARAMETER = regex.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)>")
_FUNCTION_END = regex.compile(r"\s*+</function>")
_CALL_END = regex.compile(rf"\s*+{_CLOSING}")
_VALUE_END = regex.compile(rf"\s*+{_VALUE_CLOSING}")
#: a key that the end of the output cuts off
_KEY_BEGIN = regex.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)")
_STRING = frozenset({"string"})


class Qwen3Coder(CallStates):
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

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._signatures = functions if isinstance(functions, Signatures) else Signatures(functions or {})
        self._function = ""
        self._types = _STRING
        #: what comes before the next parameter in the JSON of the arguments
        self._before = ""

    @staticmethod
    def in_template(template: str) -> bool:
        return all(tag in template for tag in (Qwen3Coder.opening, "<function=", "<parameter="))

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        parameters = parameters_form(schema, rules)
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
        match = _FUNCTION.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
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
        # One line break belongs to the tag behind it.
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
        match = _VALUE_END.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._go(0, self._parameters)
        return not match.partial and self._go(match.end(), self._parameters)

    def _tail(self) -> bool:
        """Behind the function. Text that is not the end of the call is content."""
        match = _CALL_END.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._go(0, self._text)
        return not match.partial and self._go(match.end(), self._gap)
