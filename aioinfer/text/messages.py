"""Messages of a chat, checked: what every chat template gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.errors import InvalidRequest, shown

__all__ = ["RESULT_ROLES", "check_text", "plain_messages"]

RESULT_ROLES = ("tool", "function")


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat with their contents as text, or None, and without keys that are null or lists of
    no calls. Raises InvalidRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest("messages", "must be a non-empty list")
    return [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _message(field: str, message: Any) -> dict[str, Any]:
    """A chat message with its content as plain text; OpenAI's text parts are joined."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{field}.role", "is missing")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", f"must be non-empty text, got {shown(role)}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(_part(f"{field}.content[{number}]", part) for number, part in enumerate(content))
    if content is None:
        # A message of calls has none, and a call may return nothing.
        if role != "assistant" and (role not in RESULT_ROLES or "content" not in message):
            raise InvalidRequest(f"{field}.content", "is missing")
    else:
        if not isinstance(content, str):
            raise InvalidRequest(f"{field}.content", "must be text or a list of text parts")
        check_text(f"{field}.content", content)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{field}.tool_calls", "must be a list of calls")
    plain = {"role": role, "content": content}
    for key, value in message.items():
        # Templates ask whether the key is there.
        if key not in plain and value is not None and not (key == "tool_calls" and not value):
            plain[key] = value
    return plain


def _part(field: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(field, f"only parts of type 'text' are supported, got {shown(kind)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "must be text")
    return text


def check_text(field: str, text: Any) -> None:
    """Raise InvalidRequest for what is no text, or has no UTF-8 encoding."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "has an unpaired surrogate, which is not text") from None
