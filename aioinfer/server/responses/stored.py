"""Stored responses: what ``previous_response_id`` continues.

A response that is stored has its whole conversation: the items of those before it, its own input and its
output. A conversation that goes on is the same chat as if its client had sent all of that: its pages are in
the prefix cache, and nothing else is kept of it. Items are shared by the responses of a conversation.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioinfer.chat.parts import Part
from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest, shown
from aioinfer.ledger import Share
from aioinfer.server.owned import Owned
from aioinfer.server.responses.fields import CallItem, InputImage, MessageItem, OutputItem, ReasoningItem
from aioinfer.server.responses.objects import ITEM

__all__ = ["Draft", "Item", "StoredResponse", "StoredResponses", "new_response_id", "output_item"]

Item = Mapping[str, Any]
#: what the stored responses of this process take, at most
_STORED = Share("stored responses", bound=64 << 20)
_OFF = "is not supported by this server: it stores no responses (max_stored_responses)"
#: bytes of an item besides those of its JSON
_AROUND = 512


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: its conversation, of which the first ``prompt`` items are not its own output, what this
    takes, and its body as JSON."""

    id: str
    items: tuple[Item, ...]
    prompt: int
    size: int
    body: str


class StoredResponses:
    """Those of all keys. They are in memory only, and end with the server."""

    def __init__(self, config: ServerConfig) -> None:
        self._ttl = config.stored_response_timeout
        self._kept: Owned[StoredResponse] = Owned(config.max_stored_responses, share=_STORED)
        self.clear = self._kept.clear

    @property
    def enabled(self) -> bool:
        return self._kept.most > 0

    def find(self, owner: str, name: str) -> StoredResponse | None:
        """A response of a key. On any thread."""
        return self._kept.find(owner, name)

    def previous(self, owner: str, name: str | None) -> StoredResponse | None:
        """The response that a call continues. On any thread. Raises InvalidRequest."""
        if name is None:
            return None
        if not self.enabled:
            raise InvalidRequest("previous_response_id", _OFF, code="unsupported_parameter")
        found = self.find(owner, name)
        if found is None:
            message = f"there is no stored response {shown(name)}, or it was too long ago"
            raise InvalidRequest("previous_response_id", message, code="previous_response_not_found")
        return found

    def remove(self, owner: str, name: str) -> bool:
        """Forget a response; False: there is none."""
        return self._kept.remove(owner, name)

    def draft(self, owner: str, name: str, previous: StoredResponse | None, given: Any) -> Draft:
        """A response that is to be stored when it ends. ``given``: its ``input``, checked."""
        before = () if previous is None else previous.items
        own = _input_items(given, name)
        size = sum(map(_size, own)) + (0 if previous is None else previous.size)

        def keep(response: StoredResponse) -> None:
            if previous is not None:
                self._kept.use(owner, previous.id)
            self._kept.add(owner, name, response, ttl=self._ttl, size=response.size + len(response.body))

        return Draft(name, (*before, *own), size, keep)


@dataclass(frozen=True, slots=True)
class Draft:
    """A response that is not over: the items that it answers, and what stores it."""

    id: str
    items: tuple[Item, ...]
    size: int
    _keep: Callable[[StoredResponse], None]

    def store(self, output: Sequence[Item], body: str) -> None:
        """The response has ended with these items and this body. On the event loop."""
        size = self.size + sum(map(_size, output))
        self._keep(StoredResponse(self.id, (*self.items, *output), len(self.items), size, body))


def new_response_id() -> str:
    """An id that nobody guesses."""
    return f"resp_{secrets.token_hex(16)}"


def output_item(part: Part, name: str, status: str) -> Item:
    """An item of an answer, without its logprobs."""
    _, kind, content = ITEM[part.kind]
    found: dict[str, Any] = {"id": name, "type": kind, "status": status}
    if part.kind == "call":
        return {**found, "call_id": part.call_id, "name": part.name, "arguments": part.text}
    if part.kind == "reasoning":
        return {**found, "summary": [], "content": [{"type": content, "text": part.text}]}
    return {**found, "role": "assistant", "content": [_output_text(part.text)]}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _input_items(given: Any, name: str) -> list[Item]:
    """The items of a checked ``input``, with ids and all that clients' types have."""
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given, type=None)]
    digits = name.removeprefix("resp_")
    return [_input_item(each, f"{digits}_in{number}") for number, each in enumerate(given)]


def _input_item(item: Any, digits: str) -> Item:
    kind, found = _KINDS[type(item)](item)
    return {"id": f"{kind}_{digits}", "status": "completed", **found}


def _message(item: MessageItem) -> tuple[str, Item]:
    given = item.content or ()
    content = [_input_part(part) for part in ([given] if isinstance(given, str) else given)]
    if item.role == "assistant":
        content = [_output_text(part["text"]) for part in content]
    return "msg", {"type": "message", "role": item.role, "content": content}


def _input_part(part: Any) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "input_image", "image_url": part.image_url, "detail": "auto"}
    return {"type": "input_text", "text": part if isinstance(part, str) else part.text}


def _call(item: CallItem) -> tuple[str, Item]:
    called = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments or "{}"}
    return "fc", {"type": "function_call", **called}


def _output(item: OutputItem) -> tuple[str, Item]:
    output: Any = item.output or ""
    if not isinstance(output, str):
        output = [_input_part(part) for part in output]
        if all(part["type"] == "input_text" for part in output):
            output = "".join([part["text"] for part in output])
    named = {} if item.name is None else {"name": item.name}
    return "fco", {"type": "function_call_output", "call_id": item.call_id, "output": output, **named}


def _reasoning(item: ReasoningItem) -> tuple[str, Item]:
    content = [{"type": part.type, "text": part.text} for part in item.content]
    summary = [{"type": part.type, "text": part.text} for part in item.summary]
    return "rs", {"type": "reasoning", "content": content, "summary": summary}


#: model of an item -> the prefix of its id, and its members
_KINDS: dict[Any, Callable[[Any], tuple[str, Item]]] = {
    MessageItem: _message,
    CallItem: _call,
    OutputItem: _output,
    ReasoningItem: _reasoning,
}


def _size(item: Item) -> int:
    """What an item takes. Images count by their lengths: to write one as JSON would take long."""
    parts = item.get("content") or item.get("output")
    images: list[str] = []
    if isinstance(parts, list):
        images = [part["image_url"] for part in parts if "image_url" in part]
    if isinstance(parts, list) and images:
        plain = [part for part in parts if "image_url" not in part]
        item = {**item, "content": plain, "output": None}
    return _AROUND + len(json.dumps(item)) + sum(map(len, images))
