"""Variables of chat templates, and the fields of several dialects that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.answers import ChatFormat
from aioinfer.errors import InvalidRequest
from aioinfer.text.chat_template import UNREAD

__all__ = ["EFFORTS", "Variables"]

#: arguments of the tokenizer that are no variables of the template
_RESERVED = frozenset({"self", "messages", "conversation", "tools", "tokenize", "chat_template"})
#: tokens of thought by amount of thinking, for templates that do not read it; None: no limit. The numbers of
#: Gemini's endpoint for OpenAI's clients, but for "minimal"
EFFORTS: Mapping[str, int | None] = {
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": 24576,
    **dict.fromkeys(("xhigh", "max")),
}
#: what the tokenizer reads in the template's place
_SWITCHES = ("add_generation_prompt", "continue_final_message")


class Variables:
    """The variables of a chat's template, and the fields that they come from.

    Attributes:
        budget: tokens of thought that fields of the dialect allow, and the field; None: they do not say.
    """

    def __init__(self, chat: ChatFormat, given: Mapping[str, Any] | None = None) -> None:
        """``given``: ``chat_template_kwargs``."""
        self._chat = chat
        self.budget: tuple[int, str] | None = None
        self._values = dict(given or {})
        self._fields = {name: f"chat_template_kwargs.{str(name)[:80]}" for name in self._values}

    def put(self, name: str, value: Any, field: str) -> None:
        """Set a variable, if ``value`` is not None. Raises InvalidRequest if it has another value already."""
        if value is None:
            return
        if self._values.get(name, value) != value:
            raise InvalidRequest(field, f"differs from {self._fields[name]}")
        self._fields[name], self._values[name] = field, value

    def think(self, on: bool | None, field: str, *, wish: bool = False) -> None:
        """Switch thinking on or off, as the template can. Raises InvalidRequest if it cannot be; but for a
        ``wish`` of what the model does anyway."""
        if on is None:
            return
        names, reasoning = self._chat.template_names, self._chat.reasoning
        # The template of gpt-oss reads a key of messages with the name "thinking".
        harmony = reasoning is not None and reasoning.name == "harmony"
        for variable in ("enable_thinking",) if harmony else ("enable_thinking", "thinking"):
            if names is None or variable in names:
                self.put(variable, on, field)
                return
        # Without a switch, a model with a parser of reasoning always thinks, and one without never does.
        if on != (reasoning is not None) or (on and not wish):
            raise InvalidRequest(field, UNREAD, code="unsupported_parameter")

    def effort(self, value: Any, field: str, *, wish: bool = False) -> Any:
        """The amount of thinking, for a template that reads it. For others "none" switches thinking off, and
        the words of ``EFFORTS`` limit a model that thinks, unless there is a budget already. What remains is
        refused, or left out if it is a ``wish``. Returns what has an effect."""
        names = self._chat.template_names
        if names is None or "reasoning_effort" in names:
            self.put("reasoning_effort", value, field)
        elif value == "none":
            self.think(False, field)
        elif self._chat.reasoning is not None and isinstance(value, str) and value in EFFORTS:
            self.limit(EFFORTS[value], field)
        elif wish:
            return None
        else:
            self.put("reasoning_effort", value, field)
        return value

    def limit(self, tokens: int | None, field: str) -> None:
        """Set ``budget``, unless it is there already."""
        if tokens is not None and self.budget is None:
            self.budget = tokens, field

    def checked(self) -> dict[str, Any]:
        """The variables. Raises InvalidRequest for one that cannot be set, or that the template does not
        read."""
        if _RESERVED & self._values.keys():
            raise InvalidRequest("chat_template_kwargs", "may hold variables of the template only")
        if self._values.get("add_generation_prompt") and self._values.get("continue_final_message"):
            raise InvalidRequest("continue_final_message", "cannot be combined with add_generation_prompt")
        names = self._chat.template_names
        for name, field in self._fields.items():
            read = names is None or name in names or name in _SWITCHES
            if self._values[name] is not None and not read:
                raise InvalidRequest(field, UNREAD, code="unsupported_parameter")
        return self._values
