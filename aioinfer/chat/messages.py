"""Messages of a chat, converted from OpenAI's form to the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aioinfer.chat.fields import NESTED, check
from aioinfer.errors import InvalidRequest, shown

__all__ = ["UNREAD", "check_variables", "parse_messages"]


_MESSAGE, _PART = NESTED["messages[]"], NESTED["messages[].content[]"]
_CALL, _FUNCTION = NESTED["messages[].tool_calls[]"], NESTED["messages[].tool_calls[].function"]


#: why a field is refused that the template would have to read
UNREAD = "is not read by the model's chat template"


#: arguments of the tokenizer that are no variables of the template
_RESERVED = frozenset({"self", "messages", "conversation", "tools", "tokenize", "chat_template"})
#: what the tokenizer reads in the template's place
_SWITCHES = ("add_generation_prompt", "continue_final_message")


def check_variables(
    kwargs: Mapping[str, Any], fields: Mapping[str, str], template_names: frozenset[str] | None
) -> None:
    """Raise InvalidRequest for variables of the chat template that cannot be set, or that it does not read.

    ``fields``: where each of them comes from; ``template_names``: what the template reads, if that is known.
    """
    if _RESERVED & kwargs.keys() & fields.keys():
        raise InvalidRequest("chat_template_kwargs", "may hold variables of the template only")
    if kwargs.get("add_generation_prompt") and kwargs.get("continue_final_message"):
        raise InvalidRequest("continue_final_message", "cannot be combined with add_generation_prompt")
    for name, where in fields.items():
        if kwargs[name] is not None and not (
            template_names is None or name in template_names or name in _SWITCHES
        ):
            raise InvalidRequest(where, UNREAD, code="unsupported_parameter")


def parse_messages(messages: Any, template_names: frozenset[str] | None = None) -> list[dict[str, Any]]:
    """The messages, with the arguments of calls as objects. The tokenizer checks roles and contents.

    ``template_names``: the keys that the chat template reads, if they are known. Raises InvalidRequest.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "must be a non-empty list")
    return [
        _message(f"messages[{number}]", message, template_names) for number, message in enumerate(messages)
    ]


def _with_thinking(message: dict[str, Any], template_names: frozenset[str]) -> dict[str, Any]:
    """The message with its reasoning where the template of gpt-oss reads it. Older versions of transformers
    leave that to the caller."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    # With calls it refuses reasoning beside content, which is a preamble of them.
    if message.get("tool_calls") and message.get("content"):
        return message
    if reasoning is None or "thinking" not in template_names or "reasoning_content" in template_names:
        return message
    return {"thinking": reasoning, **message}


def _message(field: str, given: Any, template_names: frozenset[str] | None) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequest(field, "must be an object")
    check(given, _MESSAGE, f"{field}.", template_names or frozenset())
    message = _with_thinking(given, template_names or frozenset())
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") == "text":
            check(part, _PART, f"{field}.content[{number}].")
    answered = message.get("tool_call_id")
    if answered is not None and not isinstance(answered, str):
        raise InvalidRequest(f"{field}.tool_call_id", "must be text")
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise InvalidRequest(f"{field}.tool_calls", "must be a list")
    if calls and template_names is not None and "tool_calls" not in template_names:
        raise InvalidRequest(f"{field}.tool_calls", UNREAD, code="unsupported_parameter")
    parsed = [_call(f"{field}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    return {**message, "tool_calls": parsed}


def _call(field: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{field}.function", "must be an object")
    check(call, _CALL, f"{field}.")
    check(function, _FUNCTION, f"{field}.function.")
    if call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{field}.type", f"must be 'function', got {shown(call['type'])}")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{field}.function.name", "must be text")
    return {**call, "function": {**function, "arguments": _arguments(field, function)}}


def _arguments(field: str, function: Mapping[str, Any]) -> Any:
    """The arguments as an object. Text that is not a JSON object stays text: a conversation can continue
    after a model generated malformed arguments."""
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise InvalidRequest(f"{field}.function.arguments", "must be JSON text")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
