"""Messages of a chat, checked: what every chat template gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.errors import InvalidRequest, shown

__all__ = ["IMAGE", "RESULT_ROLES", "check_text", "parts_of", "plain_messages"]

RESULT_ROLES = ("tool", "function")
#: an image in a content: half of a surrogate pair, which no text has
IMAGE = "\udfff"


def plain_messages(messages: Any, reserved: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The messages of a chat with their contents as text, or None, and without keys that are null or lists of
    no calls. Images in contents are ``IMAGE``.

    ``reserved``: what no content of a chat with images may have, since it would stand for one; None: no
    images. Raises InvalidRequest.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest("messages", "must be a non-empty list")
    found = [
        _message(f"messages[{number}]", message, images=reserved is not None)
        for number, message in enumerate(messages)
    ]
    if reserved and any(IMAGE in (message["content"] or "") for message in found):
        for number, message in enumerate(found):
            text = next((each for each in reserved if each in (message["content"] or "")), None)
            if text is not None:
                said = f"has the text {shown(text)}, which stands for an image in a chat that has images"
                raise InvalidRequest(f"messages[{number}].content", said)
    return found


def parts_of(content: str) -> list[dict[str, Any]]:
    """A content as a list of parts, as templates read them."""
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            parts.append({"type": "image"})
        if text or content == "":
            parts.append({"type": "text", "text": text})
    return parts


def _message(field: str, message: Any, *, images: bool) -> dict[str, Any]:
    """A chat message with its content as plain text; parts are joined."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{field}.role", "is missing")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", f"must be non-empty text, got {shown(role)}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(
            _part(f"{field}.content[{number}]", part, images=images) for number, part in enumerate(content)
        )
    if content is None:
        # A message of calls has none, and a call may return nothing.
        if role != "assistant" and (role not in RESULT_ROLES or "content" not in message):
            raise InvalidRequest(f"{field}.content", "is missing")
    else:
        if not isinstance(content, str):
            raise InvalidRequest(f"{field}.content", "must be text or a list of parts")
        if isinstance(message.get("content"), str):
            images = False
        check_text(f"{field}.content", content.replace(IMAGE, "") if images else content)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{field}.tool_calls", "must be a list of calls")
    plain = {"role": role, "content": content}
    for key, value in message.items():
        # Templates ask whether the key is there.
        if key not in plain and value is not None and not (key == "tool_calls" and not value):
            plain[key] = value
    return plain


def _part(field: str, part: Any, *, images: bool) -> str:
    if images and isinstance(part, Mapping) and part.get("type") == "image":
        return IMAGE
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        known = "types 'text' and 'image'" if images else "type 'text'"
        raise InvalidRequest(field, f"only parts of {known} are supported, got {shown(kind)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "must be text")
    if IMAGE in text:
        check_text(f"{field}.text", text)
    return text


def check_text(field: str, text: Any) -> None:
    """Raise InvalidRequest for what is no text, or has no UTF-8 encoding."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "has an unpaired surrogate, which is not text") from None
