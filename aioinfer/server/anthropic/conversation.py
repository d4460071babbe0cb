"""Conversation: Anthropic's messages and their blocks as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.fields import check
from aioinfer.chat.order import TemplateOrder
from aioinfer.errors import InvalidRequest, shown
from aioinfer.server.anthropic.fields import CLEARINGS, NESTED
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
    messages of the user are one, as in Anthropic's protocol. A system message behind others is text of the
    user where the chat template would refuse it.
    """

    def __init__(self, order: TemplateOrder) -> None:
        """``order``: what the chat template takes."""
        self._order = order
        self.messages: list[dict[str, Any]] = []
        #: path of a message -> path in the body
        self.names: dict[str, str] = {}
        #: efforts that system messages ask for, and their paths in the body
        self.efforts: list[tuple[Any, str]] = []
        #: names of the tools that results refer to
        self.loaded: set[str] = set()
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
        last_of_user = max((at for at, each in enumerate(messages) if _role(each) == "user"), default=-1)
        for number, message in enumerate(messages):
            field = f"messages[{number}]"
            check(given_object(field, message), NESTED["messages[]"], f"{field}.")
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or role not in _BLOCKS:
                raise InvalidRequest(f"{field}.role", f"must be user or assistant, got {shown(role)}")
            cleared, configured = self._of_system(field, message)
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            blocks = given_list(f"{field}.content", content, [] if configured else None)
            if role == "assistant":
                self._assistant(field, blocks)
            elif blocks or not configured:
                self._others(role, field, blocks, left_out=cleared and number < last_of_user)

    def _of_system(self, field: str, message: Mapping[str, Any]) -> tuple[bool, bool]:
        """The fields that system messages alone have: whether the next message of the user clears it, and
        whether it has a configuration."""
        clear_at, config = message.get("clear_at"), message.get("output_config")
        for name in ("clear_at", "output_config"):
            if message.get(name) is not None and message["role"] != "system":
                raise InvalidRequest(f"{field}.{name}", "is for system messages")
        if clear_at not in (None, *CLEARINGS):
            raise InvalidRequest(
                f"{field}.clear_at", f"must be {' or '.join(CLEARINGS)}, got {shown(clear_at)}"
            )
        if config is not None:
            where = f"{field}.output_config"
            check(given_object(where, config), NESTED["messages[].output_config"], f"{where}.")
            self.efforts.append((config.get("effort"), f"{where}.effort"))
        return clear_at == "next_user_message", bool(config)

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

    def _others(self, role: str, field: str, blocks: list[Any], *, left_out: bool) -> None:
        """Of the user, or of the system in the midst of the conversation; what is ``left_out`` is checked
        only."""
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
        if left_out or (results and not texts):
            return
        text = "".join(texts)
        if role == "system" and self.messages and not self._order.late_system:
            role = "user"
        last = self.messages[-1] if self.messages else {}
        if role == "user" and last.get("role") == "user":
            last["content"] = [*_parts(last["content"]), {"type": "text", "text": f"\n\n{text}"}]
        else:
            self._add(role, text, field)

    def _result(self, where: str, block: Mapping[str, Any]) -> None:
        call_id = given_text(f"{where}.tool_use_id", block.get("tool_use_id"))
        content = self._output(f"{where}.content", "" if block.get("content") is None else block["content"])
        failed = block.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            raise InvalidRequest(f"{where}.is_error", "must be true or false")
        # Chat templates know no failed results: the text has to say it.
        message = self._add("tool", f"{_ERROR}{content}" if failed else content, where)
        message["tool_call_id"] = call_id
        if call_id in self._functions:
            message["name"] = self._functions[call_id]

    def _output(self, field: str, given: Any) -> str:
        """The text of a result, with the names of the tools that it refers to."""
        if isinstance(given, str):
            return given
        texts = []
        for number, each in enumerate(given_list(field, given)):
            where = f"{field}[{number}]"
            if given_object(where, each).get("type") == "tool_reference":
                check(each, NESTED["messages[].content[].content[] tool_reference"], f"{where}.")
                name = given_text(f"{where}.tool_name", each.get("tool_name"))
                self.loaded.add(name)
                texts.append(f"{name}\n")
            else:
                texts.append(given_text(f"{where}.text", _block(where, each, "system").get("text")))
        return "".join(texts)

    def _add(self, role: str, content: str, field: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": content}
        self.names[f"messages[{len(self.messages)}]"] = field
        self.messages.append(message)
        return message


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


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
