"""Items: the ``input`` of a body as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioinfer.chat.bodies import admit
from aioinfer.chat.images import ImageReader
from aioinfer.chat.order import TemplateOrder
from aioinfer.errors import InvalidRequest
from aioinfer.server.responses.fields import (
    ITEMS,
    CallItem,
    InputImage,
    MessageItem,
    OutputItem,
    ReasoningItem,
)

__all__ = ["Conversation"]


class Conversation:
    """Messages of a chat, and where in the body each comes from.

    Items of one turn of the model (reasoning, a message, calls) become one message.
    """

    def __init__(
        self,
        instructions: str | None,
        _order: TemplateOrder | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        #: path of a message -> path in the body
        self.names: dict[str, str] = {}
        #: the message of the model's turn that the next items belong to
        self._turn: dict[str, Any] | None = None
        self._functions: dict[str, str] = {}
        self._images = images or ImageReader()
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, "instructions")

    def read(self, given: str | Sequence[Any], source: str | None = None) -> None:
        """The field ``input``, whose items may be checked already, or those of another field, ``source``.
        Raises InvalidRequest."""
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
            return
        for number, item in enumerate(given):
            field = source or f"input[{number}]"
            if isinstance(item, dict):
                item = admit(ITEMS[item.get("type")], item, field)
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

    def _message(self, field: str, item: MessageItem) -> None:
        if item.content is None and item.role != "assistant":
            raise InvalidRequest(f"{field}.content", "is missing")
        if item.role == "assistant":
            turn = self._turn
            if turn is None or turn["content"] is not None or turn.get("tool_calls"):
                turn = self._begin(field)
            turn["content"] = self._content(item.content, f"{field}.content", images=False)
            return
        self._turn = None
        content = self._content(item.content, f"{field}.content", images=item.role == "user")
        self._add({"role": item.role, "content": content}, field)

    def _call(self, field: str, item: CallItem) -> None:
        turn = self._turn or self._begin(field)
        calls = turn.setdefault("tool_calls", [])
        at = f"messages[{len(self.messages) - 1}].tool_calls"
        called = f"{at}[{len(calls)}]"
        self.names |= {at: field, called: field, f"{called}.function": field}
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._functions[item.call_id] = item.name

    def _output(self, field: str, item: OutputItem) -> None:
        self._turn = None
        message = {"role": "tool", "tool_call_id": item.call_id, "content": ""}
        message["content"] = self._content(item.output, f"{field}.output", images=True)
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

    def _content(self, given: str | list[Any] | None, field: str, *, images: bool) -> Any:
        """The content of the message that comes next: the text of all parts, or parts if there are
        ``images``."""
        if isinstance(given, str) or not any(isinstance(part, InputImage) for part in given or ()):
            return given if isinstance(given, str) else "".join([part.text for part in given or ()])
        parts: list[dict[str, Any]] = []
        for number, part in enumerate(given or ()):
            if not isinstance(part, InputImage):
                parts.append({"type": "text", "text": part.text})
                continue
            if not images:
                raise InvalidRequest(f"{field}[{number}].type", "images are of users and of outputs")
            where = f"{field}[{number}].image_url"
            self._images.names[f"messages[{len(self.messages)}].content[{number}]"] = where
            parts.append(self._images.at(part.image_url, where))
        return parts
