"""Items: the ``input`` of a body as the messages of a chat."""

from __future__ import annotations

from typing import Any

from aioinfer.chat.order import TemplateOrder
from aioinfer.server.responses.fields import CallItem, MessageItem, OutputItem, ReasoningItem

__all__ = ["Conversation"]


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

    def read(self, given: str | list[Any]) -> None:
        """The field ``input``."""
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
            return
        for number, item in enumerate(given):
            field = f"input[{number}]"
            match item:
                case MessageItem():
                    self._message(field, item)
                case CallItem():
                    self._call(field, item)
                case OutputItem():
                    self._output(field, item)
                case ReasoningItem():
                    parts = item.content or item.summary
                    if text := "".join([part.text for part in parts]):
                        self._begin(field)["reasoning_content"] = text
        if len(self._first) > 1:
            self.messages[0]["content"] = "\n\n".join(self._first)

    def _message(self, field: str, item: MessageItem) -> None:
        content = _text(item.content)
        if item.role == "assistant":
            turn = self._turn
            if turn is None or turn["content"] is not None or turn.get("tool_calls"):
                turn = self._begin(field)
            turn["content"] = content
            return
        self._turn = None
        if item.role == "user":
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

    def _call(self, field: str, item: CallItem) -> None:
        turn = self._turn or self._begin(field)
        calls = turn.setdefault("tool_calls", [])
        at = f"messages[{len(self.messages) - 1}].tool_calls"
        called = f"{at}[{len(calls)}]"
        self.names |= {at: field, called: field, f"{called}.function": field}
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._functions[item.call_id] = item.name

    def _output(self, field: str, item: OutputItem) -> None:
        self._turn = None
        message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        if name := item.name or self._functions.get(item.call_id):
            message["name"] = name
        self.names[f"messages[{len(self.messages)}].content"] = f"{field}.output"
        self._add(message, field)

    def _begin(self, field: str) -> dict[str, Any]:
        """A further turn of the model."""
        self._turn = {"role": "assistant", "content": None}
        self._add(self._turn, field)
        return self._turn

    def _add(self, message: dict[str, Any], field: str) -> None:
        self.names[f"messages[{len(self.messages)}]"] = field
        self.messages.append(message)


def _text(content: str | list[Any]) -> str:
    """The text of a message: of a list of parts, all of them."""
    return content if isinstance(content, str) else "".join([part.text for part in content])
