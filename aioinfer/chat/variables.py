"""Variables of chat templates in request bodies, and the fields of several dialects that stand for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.messages import UNREAD, check_variables
from aioinfer.errors import InvalidRequest, shown

__all__ = ["template_variables"]

_SWITCHES = ("add_generation_prompt", "continue_final_message")
_STATES = {"enabled": True, "disabled": False}


def template_variables(body: Mapping[str, Any], chat: ChatFormat) -> dict[str, Any]:
    """The variables of the chat template, besides ``tools``. Raises InvalidRequest for one that the template
    does not read."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest("chat_template_kwargs", "must be an object")
    kwargs = dict(given or {})
    fields = {name: f"chat_template_kwargs.{name[:80]}" for name in kwargs}
    for field, name, value in (*_plain(body, chat), *_thinking(body, chat)):
        if kwargs.get(name, value) != value:
            raise InvalidRequest(field, f"differs from {fields[name]}")
        fields[name], kwargs[name] = field, value
    for name in _SWITCHES:
        kwargs.update({name: _flag(name, body[name])} if body.get(name) is not None else {})
    check_variables(kwargs, fields, chat.template_names)
    return kwargs


def _plain(body: Mapping[str, Any], chat: ChatFormat) -> Iterator[tuple[str, str, Any]]:
    """Fields of the body that are variables: their names as fields and variables, and their values."""
    for name in ("documents", "reasoning_effort"):
        value = body.get(name)
        if value is not None and not (name == "reasoning_effort" and _stands_for_none(value, chat)):
            yield name, name, value


def _stands_for_none(effort: Any, chat: ChatFormat) -> bool:
    """A reasoning effort that templates know as thinking which is switched off."""
    return (
        effort == "none" and chat.template_names is not None and "reasoning_effort" not in chat.template_names
    )


def _thinking(body: Mapping[str, Any], chat: ChatFormat) -> Iterator[tuple[str, str, Any]]:
    """The fields that switch thinking on or off, as the variable of that kind that the template reads."""
    names = chat.template_names
    harmony = chat.reasoning is not None and chat.reasoning.name == "harmony"
    # The template of gpt-oss reads a key of messages with that name.
    known = ("enable_thinking",) if harmony else ("enable_thinking", "thinking")
    variable = next((name for name in known if names is None or name in names), None)
    for field in ("enable_thinking", "think", "thinking", "reasoning_effort"):
        value = body.get(field)
        if field == "reasoning_effort":
            value = False if _stands_for_none(value, chat) else None
        if isinstance(value, dict) and field == "thinking":
            state = value.get("type")
            if value.keys() != {"type"} or not isinstance(state, str) or state not in _STATES:
                raise InvalidRequest(
                    field, "must be true, false, or an object with the type enabled or disabled"
                )
            value = _STATES[state]
        if value is None:
            continue
        value = _flag(field, value)
        if variable is not None:
            yield field, variable, value
        elif value or chat.reasoning is not None:
            raise InvalidRequest(field, UNREAD, code="unsupported_parameter")
        # else: a model that does not think cannot be told to stop


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"must be true or false, got {shown(value)}")
    return value
