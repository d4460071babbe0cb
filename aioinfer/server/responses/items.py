"""Items: the ``input`` of a body as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.fields import Table, check
from aioinfer.chat.order import TemplateOrder
from aioinfer.errors import InvalidRequest, shown
from aioinfer.server.responses.fields import NESTED
from aioinfer.server.translation import given_list, given_object, given_text

__all__ = ["Conversation"]

_PART = NESTED["input[].content[] text"]
#: of reasoning and of its summary: they differ in their types only
_THOUGHT = NESTED["input[].summary[]"]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")


class Conversation:
    """Messages of a chat, and where in the body each comes from.

    Items of one turn of the model (reasoning, a message, calls) become one message; system messages in front
    of all others become one, because most chat templates take no second. What else the template would refuse
    is put otherwise: a later system message as text of the user, and successive messages of the user as one.
    """

    def __init__(self, instructions: str | None, order: TemplateOrder) -> None:
        """``order``: what the chat template takes."""
        self._order = order
        self.messages: list[dict[str, Any]] = []
        #: path of a message -> path in the body
        self.names: dict[str, str] = {}
        #: the message of the model's turn that the next items belong to
        self._turn: dict[str, Any] | None = None
        self._functions: dict[str, str] = {}
        #: system messages in front of all others
        self._first: list[str] = []
        if instructions is not None:
            self._system(instructions, "instructions")

    def read(self, given: Any) -> None:
        """The field ``input``. Raises InvalidRequest of a field of the body."""
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
            return
        if not isinstance(given, list) or not given:
            raise InvalidRequest("input", "must be text or a non-empty list of items")
        for number, item in enumerate(given):
            self._item(f"input[{number}]", given_object(f"input[{number}]", item))
        if len(self._first) > 1:
            self.messages[0]["content"] = "\n\n".join(self._first)

    def _item(self, field: str, item: dict[str, Any]) -> None:
        match item.get("type"):
            case None | "message":
                self._message(field, item)
            case "function_call":
                self._call(field, item)
            case "function_call_output":
                self._output(field, item)
            case "reasoning":
                self._reasoning(field, item)
            case "item_reference":
                message = "is not supported by this server: nothing is stored, send the item itself"
                raise InvalidRequest(f"{field}.type", message, code="unsupported_parameter")
            case other:
                message = f"{shown(other)} is not supported by this server"
                raise InvalidRequest(f"{field}.type", message, code="unsupported_parameter")

    def _message(self, field: str, item: Mapping[str, Any]) -> None:
        _check(item, "message", field)
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")
        content = _content(f"{field}.content", item.get("content"))
        if role == "assistant":
            turn = self._turn
            if turn is None or turn["content"] is not None or turn.get("tool_calls"):
                turn = self._begin(field)
            turn["content"] = content
            return
        self._turn = None
        if role == "user":
            self._user(content, field)
        else:
            self._system(content, field)

    def _system(self, content: str, field: str) -> None:
        if len(self.messages) <= bool(self._first):
            self._first.append(content)
            if len(self._first) > 1:
                return
        elif not self._order.late_system:
            self._user(content, field)
            return
        self._add({"role": "system", "content": content}, field)

    def _user(self, content: str, field: str) -> None:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "user" and not self._order.successive:
            last["content"] = f"{last['content']}\n\n{content}"
        else:
            self._add({"role": "user", "content": content}, field)

    def _reasoning(self, field: str, item: Mapping[str, Any]) -> None:
        _check(item, "reasoning", field)
        content = _thoughts(f"{field}.content", item.get("content"), "reasoning_text")
        summary = _thoughts(f"{field}.summary", item.get("summary"), "summary_text")
        if text := content or summary:
            self._begin(field)["reasoning_content"] = text

    def _call(self, field: str, item: Mapping[str, Any]) -> None:
        _check(item, "function_call", field)
        name = given_text(f"{field}.name", item.get("name"))
        call_id = given_text(f"{field}.call_id", item.get("call_id"))
        turn = self._turn or self._begin(field)
        calls = turn.setdefault("tool_calls", [])
        at = self._path(len(self.messages) - 1)
        self.names[f"{at}.tool_calls"] = field
        self.names[f"{at}.tool_calls[{len(calls)}]"] = field
        self.names[f"{at}.tool_calls[{len(calls)}].function"] = field
        function = {"name": name, "arguments": given_text(f"{field}.arguments", item.get("arguments"))}
        calls.append({"id": call_id, "type": "function", "function": function})
        self._functions[call_id] = name

    def _output(self, field: str, item: Mapping[str, Any]) -> None:
        _check(item, "function_call_output", field)
        call_id = given_text(f"{field}.call_id", item.get("call_id"))
        content = _content(f"{field}.output", item.get("output"))
        self._turn = None
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        given = item.get("name")
        name = None if given is None else given_text(f"{field}.name", given)
        if name := name or self._functions.get(call_id):
            message["name"] = name
        self._add(message, field)
        self.names[f"{self._path(len(self.messages) - 1)}.content"] = f"{field}.output"

    def _begin(self, field: str) -> dict[str, Any]:
        """A further turn of the model."""
        self._turn = {"role": "assistant", "content": None}
        self._add(self._turn, field)
        return self._turn

    def _add(self, message: dict[str, Any], field: str) -> None:
        self.names[self._path(len(self.messages))] = field
        self.messages.append(message)

    def _path(self, number: int) -> str:
        return f"messages[{number}]"


def _check(item: Mapping[str, Any], kind: str, field: str) -> None:
    table: Table = NESTED[f"input[] {kind}"]
    check(item, table, f"{field}.")


def _content(field: str, content: Any) -> str:
    """The text of a message: of a list of parts, all of them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, f"must be text or a list of parts, got {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        where = f"{field}[{number}]"
        kind = given_object(where, part).get("type")
        if kind not in _TEXTS:
            message = f"{shown(kind)} is not supported by this server: text is"
            raise InvalidRequest(f"{where}.type", message, code="unsupported_parameter")
        check(part, _PART, f"{where}.")
        texts.append(given_text(f"{where}.text", part.get("text")))
    return "".join(texts)


def _thoughts(field: str, given: Any, kind: str) -> str:
    """The text of a reasoning item's parts."""
    texts = []
    for number, part in enumerate(given_list(field, given, [])):
        where = f"{field}[{number}]"
        if given_object(where, part).get("type") != kind:
            raise InvalidRequest(f"{where}.type", f"must be {kind!r}, got {shown(part.get('type'))}")
        check(part, _THOUGHT, f"{where}.")
        texts.append(given_text(f"{where}.text", part.get("text")))
    return "".join(texts)
