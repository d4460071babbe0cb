"""Translation: bodies of other protocols become those of OpenAI's chats, and errors go the other way.

A parser of a protocol fills a :class:`ChatBody`, field by field with where each comes from. What a field
means is decided in one place, the parsers of :mod:`aioinfer.chat`; what they refuse has the name that the
client used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aioinfer.chat.fields import Honoured, Table
from aioinfer.chat.structured import parse_grammar
from aioinfer.errors import InvalidRequest, renamed_field, shown
from aioinfer.server.openai.fields import CHAT
from aioinfer.server.openai.protocol import Call, Served, chat_call

__all__ = ["EXTENSIONS", "ChatBody", "given_list", "given_object", "given_text"]

#: names of `max_tokens` and `stop` in other protocols differ
_OWN_NAMES = frozenset({"max_tokens", "max_completion_tokens", "stop"})
#: their answers have no place for it
_NOT_WRITTEN = frozenset({"prompt_logprobs"})
_BESIDE_SAMPLING = (
    *("priority", "cache_salt", "routing_key", "request_id", "chat_template_kwargs"),
    "structured_outputs",
)
#: fields of chats that other protocols do not have, honoured there as well
EXTENSIONS: Table = {
    name: rule
    for name, rule in CHAT.items()
    if isinstance(rule, Honoured)
    and name not in _OWN_NAMES | _NOT_WRITTEN
    and (rule.param is not None or name in _BESIDE_SAMPLING)
}


class ChatBody:
    """The fields of a chat, and the names that they have in the body of another protocol."""

    def __init__(self, given: Mapping[str, Any], served: Served) -> None:
        self._served = served
        self.fields: dict[str, Any] = {
            name: given[name] for name in ("model", *EXTENSIONS) if given.get(name) is not None
        }
        #: path in the chat -> path in the body
        self.names: dict[str, str] = {}

    def put(self, name: str, value: Any, source: str) -> None:
        """Set a field of the chat, which comes from ``source`` in the body. None is an absent field."""
        self.names[name] = source
        if value is not None:
            self.fields[name] = value

    def think(self, on: bool, source: str) -> None:
        """Switch the model's reasoning on or off. Raises InvalidRequest if it cannot be."""
        chat = self._served.chat
        names = chat.template_names or frozenset()
        for switch in ("enable_thinking", "thinking"):
            if switch in names:
                kwargs = given_object("chat_template_kwargs", self.fields.get("chat_template_kwargs"), {})
                if kwargs.get(switch, on) != on:
                    raise InvalidRequest(source, f"differs from chat_template_kwargs.{switch}")
                self.fields["chat_template_kwargs"] = {**kwargs, switch: on}
                return
        # Without a switch, a model with a parser of reasoning always thinks, and one without never does.
        if on != (chat.reasoning is not None):
            state = "always" if chat.reasoning is not None else "never"
            raise InvalidRequest(
                source, f"cannot be changed: the model {state} thinks", code="unsupported_parameter"
            )

    def effort(self, value: Any, source: str, levels: Sequence[str]) -> str | None:
        """How much the model thinks, one of ``levels``: what the chat template reads of it. A template that
        does not read it is not told, because clients send one on their own; "none" switches thinking off.

        Returns the effort that the model is told of. Raises InvalidRequest.
        """
        if value is None:
            return None
        if value not in levels:
            raise InvalidRequest(source, f"must be one of {', '.join(levels)}, got {shown(value)}")
        names = self._served.chat.template_names
        if names is None or "reasoning_effort" in names:
            self.put("reasoning_effort", value, source)
        elif value == "none":
            self.think(False, source)
        else:
            return None
        return str(value)

    def call(self, prefix: str) -> Call:
        """The call. Raises InvalidRequest of a field of the body."""
        try:
            if self.fields.get("tool_choice") not in (None, "auto", "none"):
                # A required call leaves no text that a format would be of; one that is wrong is refused.
                parse_grammar({"response_format": self.fields.pop("response_format", None)})
            call = chat_call(self.fields, self._served, prefix)
        except InvalidRequest as refused:
            raise self.named(refused) from None
        names = {name: renamed_field(source, self.names) for name, source in call.names.items()}
        return replace(call, names={**self.names, **names})

    def named(self, refused: InvalidRequest) -> InvalidRequest:
        """The error with the name of the body's field."""
        return InvalidRequest(renamed_field(refused.field, self.names), refused.message, code=refused.code)


def given_object(field: str, value: Any, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """``value``, or ``absent`` for None. Raises InvalidRequest of ``field`` if it is no object."""
    if value is None and absent is not None:
        return absent
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"must be an object, got {shown(value)}")
    return value


def given_list(field: str, value: Any, absent: list[Any] | None = None) -> list[Any]:
    """``value``, or ``absent`` for None. Raises InvalidRequest of ``field`` if it is no list."""
    if value is None and absent is not None:
        return absent
    if not isinstance(value, list):
        raise InvalidRequest(field, f"must be a list, got {shown(value)}")
    return value


def given_text(field: str, value: Any) -> str:
    """``value``. Raises InvalidRequest of ``field`` if it is no text."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be text, got {shown(value)}")
    return value
