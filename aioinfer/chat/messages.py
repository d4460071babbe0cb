"""Messages of a chat, converted from OpenAI's form to the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from aioinfer.chat.bodies import admit
from aioinfer.chat.fields import Message
from aioinfer.errors import InvalidRequest
from aioinfer.images.source import ImageSource
from aioinfer.text.chat_template import UNREAD

__all__ = ["parse_messages"]


#: calls as text: see ToolCallParser.told
Told = Callable[[Sequence[tuple[str, str]]], str | None]


def parse_messages(
    messages: Any, template_names: frozenset[str] | None = None, told: Told | None = None
) -> list[dict[str, Any]]:
    """The messages, with the arguments of calls as objects. The tokenizer checks roles and contents.

    ``template_names``: the keys that the chat template reads, if they are known. ``told``: makes calls a part
    of the content where it does not read them. Raises InvalidRequest.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "must be a non-empty list")
    return [_message(f"messages[{at}]", message, template_names, told) for at, message in enumerate(messages)]


def _message(
    field: str, given: Any, template_names: frozenset[str] | None, told: Told | None
) -> dict[str, Any]:
    admit(Message, _without_images(given), field, template_names or ())
    message = _with_thinking(given, template_names or frozenset())
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if calls and template_names is not None and "tool_calls" not in template_names:
        text = told and told([(call["function"]["name"], _as_text(call)) for call in calls])
        if text is None:
            raise InvalidRequest(f"{field}.tool_calls", UNREAD, code="unsupported_parameter")
        return _with_text(message, text)
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]}


def _without_images(message: Any) -> Any:
    """The message without images, which are no JSON: a body cannot have them."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    nothing = {"type": "text", "text": ""}
    return {**message, "content": [nothing if _is_image(part) else part for part in content]}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and type(part.get("image")) is ImageSource


def _as_text(call: dict[str, Any]) -> str:
    """The arguments of a call as they are written."""
    arguments = call["function"].get("arguments") or {}
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with its calls as the end of its content."""
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    if isinstance(content, list):
        return {**plain, "content": [*content, {"type": "text", "text": text}]}
    return {**plain, "content": f"{content}\n{text}" if content else text}


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


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object. Text that is not a JSON object stays text: a conversation can
    continue after a model generated malformed arguments."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}
