"""Conversation: Anthropic's messages and their blocks as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.fields import check
from aioinfer.errors import InvalidRequest, shown
from aioinfer.server.anthropic.fields import NESTED
from aioinfer.server.translation import given_list, given_object, given_text

__all__ = ["Conversation"]

#: blocks of the messages of a role
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_ERROR = "Error: "


class Conversation:
    """Messages of a chat, and where in the body each comes from.

    Results of tools are messages of their own, in front of what the user says beside them. Successive
    messages of the user are one, as in Anthropic's protocol.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        #: path of a message -> path in the body
        self.names: dict[str, str] = {}
        self._functions: dict[str, str] = {}

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def read(self, system: Any, messages: Any) -> None:
        """The fields ``system`` and ``messages``. Raises InvalidRequest of a field of the body."""
        if system is not None:
            text = _texts("system", system)
            if text:
                self._add("system", text, "system")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages", "must be a non-empty list")
        for number, message in enumerate(messages):
            field = f"messages[{number}]"
            check(given_object(field, message), NESTED["messages[]"], f"{field}.")
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or role not in _BLOCKS:
                raise InvalidRequest(f"{field}.role", f"must be user or assistant, got {shown(role)}")
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            blocks = given_list(f"{field}.content", content)
            if role == "assistant":
                self._assistant(field, blocks)
            else:
                self._others(role, field, blocks)

    def _assistant(self, field: str, blocks: list[Any]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        at = f"messages[{len(self.messages)}]"
        for number, given in enumerate(blocks):
            where = f"{field}.content[{number}]"
            block = _block(where, given, "assistant")
            match block["type"]:
                case "text":
                    texts.append(given_text(f"{where}.text", block.get("text")))
                case "thinking":
                    thoughts.append(given_text(f"{where}.thinking", block.get("thinking")))
                case "tool_use":
                    self.names[f"{at}.tool_calls"] = field
                    self.names[f"{at}.tool_calls[{len(calls)}]"] = where
                    self.names[f"{at}.tool_calls[{len(calls)}].function"] = where
                    calls.append(self._call(where, block))
        message = self._add("assistant", "".join(texts), field)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls

    def _call(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        name = given_text(f"{where}.name", block.get("name"))
        call_id = given_text(f"{where}.id", block.get("id"))
        self._functions[call_id] = name
        arguments = given_object(f"{where}.input", block.get("input"))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _others(self, role: str, field: str, blocks: list[Any]) -> None:
        """Of the user, or of the system in the midst of the conversation."""
        texts: list[str] = []
        results = 0
        for number, given in enumerate(blocks):
            where = f"{field}.content[{number}]"
            block = _block(where, given, role)
            if block["type"] == "text":
                texts.append(given_text(f"{where}.text", block.get("text")))
            else:
                self._result(where, block)
                results += 1
        if results and not texts:
            return
        text = "".join(texts)
        last = self.messages[-1] if self.messages else {}
        if role == "user" and last.get("role") == "user":
            last["content"] = [*_parts(last["content"]), {"type": "text", "text": f"\n\n{text}"}]
        else:
            self._add(role, text, field)

    def _result(self, where: str, block: Mapping[str, Any]) -> None:
        call_id = given_text(f"{where}.tool_use_id", block.get("tool_use_id"))
        content = _texts(f"{where}.content", "" if block.get("content") is None else block["content"])
        failed = block.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            raise InvalidRequest(f"{where}.is_error", "must be true or false")
        # Chat templates know no failed results: the text has to say it.
        message = self._add("tool", f"{_ERROR}{content}" if failed else content, where)
        message["tool_call_id"] = call_id
        if call_id in self._functions:
            message["name"] = self._functions[call_id]

    def _add(self, role: str, content: str, field: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": content}
        self.names[f"messages[{len(self.messages)}]"] = field
        self.messages.append(message)
        return message


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _block(where: str, given: Any, role: str) -> dict[str, Any]:
    """A block that messages of ``role`` may have. Raises InvalidRequest."""
    block = given_object(where, given)
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS[role]:
        message = f"{shown(kind)} of {role} is not supported by this server: {', '.join(_BLOCKS[role])}"
        raise InvalidRequest(f"{where}.type", message, code="unsupported_parameter")
    check(block, NESTED[f"messages[].content[] {kind}"], f"{where}.")
    return block


def _texts(field: str, given: Any) -> str:
    """The text of a list of blocks that are text. Raises InvalidRequest."""
    if isinstance(given, str):
        return given
    blocks = given_list(field, given)
    parts = [_block(f"{field}[{at}]", block, "system") for at, block in enumerate(blocks)]
    return "".join([given_text(f"{field}[{at}].text", part.get("text")) for at, part in enumerate(parts)])
