"""Checkers of event orders: state machines that take the events of a stream and raise AssertionError where
the protocol allows no such event, and assemble what the events say."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MessageOrder", "ResponseOrder"]

#: type of an item -> name of the events of its text
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
#: type of a block -> field of its deltas
_DELTAS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseOrder:
    """The events of the Responses protocol."""

    def __init__(self) -> None:
        self._number = 0
        self._state = "nothing"
        self._created: dict[str, Any] = {}
        self._item: dict[str, Any] = {}
        self._part: dict[str, Any] | None = None
        self._text: list[str] = []
        self._scores: list[Any] = []
        #: items that are done
        self.items: list[dict[str, Any]] = []
        #: the object at the end
        self.response: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None

    def take(self, name: str | None, data: str) -> None:
        event = json.loads(data)
        kind = event["type"]
        assert name == kind
        assert event["sequence_number"] == self._number
        self._number += 1
        assert self._state != "ended", f"{kind} behind the end"
        if kind == "error":
            self.error = event
            self._state = "failing"
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self._end(kind.removeprefix("response."), event["response"])
        elif kind in ("response.created", "response.in_progress"):
            self._begin(kind, event["response"])
        else:
            self._in_items(kind, event)

    def _begin(self, kind: str, response: dict[str, Any]) -> None:
        before = {"response.created": "nothing", "response.in_progress": "created"}[kind]
        assert self._state == before, f"{kind} while {self._state}"
        assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
        self._state = {"nothing": "created", "created": "between"}[before]
        self._created = response

    def _in_items(self, kind: str, event: dict[str, Any]) -> None:
        assert event["output_index"] == len(self.items), kind
        if kind == "response.output_item.added":
            assert self._state == "between", f"{kind} while {self._state}"
            self._item, self._text, self._scores = event["item"], [], []
            assert self._item["status"] == "in_progress"
            assert not self._item.get("content")
            assert not self._item.get("arguments")
            self._state = "arguments" if self._item["type"] == "function_call" else "item"
            return
        kind_of_text = _TEXTS[self._item["type"]]
        if kind == "response.output_item.done":
            assert self._state == "ready", f"{kind} while {self._state}"
            self._done(event["item"])
            return
        assert event["item_id"] == self._item["id"]
        if kind.startswith("response.content_part."):
            assert event["content_index"] == 0
            assert event["part"]["type"] == _PARTS[self._item["type"]]
            states = {"added": ("item", "text"), "done": ("full", "ready")}
            before, behind = states[kind.rsplit(".", 1)[1]]
            assert self._state == before, f"{kind} while {self._state}"
            assert event["part"]["text"] == "".join(self._text)
            self._part, self._state = event["part"], behind
        elif kind == f"response.{kind_of_text}.delta":
            assert self._state in ("text", "arguments"), f"{kind} while {self._state}"
            self._text.append(event["delta"])
            self._scores += event.get("logprobs", [])
        else:
            assert kind == f"response.{kind_of_text}.done", kind
            assert self._state in ("text", "arguments"), f"{kind} while {self._state}"
            arguments = self._state == "arguments"
            assert event["arguments" if arguments else "text"] == "".join(self._text)
            assert event.get("logprobs", []) == self._scores
            self._state = "ready" if arguments else "full"

    def _done(self, item: dict[str, Any]) -> None:
        kept = ("id", "type", "call_id", "name", "role")
        assert [item.get(name) for name in kept] == [self._item.get(name) for name in kept]
        if item["type"] == "function_call":
            assert item["arguments"] == "".join(self._text)
        else:
            assert item["content"] == [self._part]
        assert not self.items or self.items[-1]["status"] == "completed"
        self.items.append(item)
        self._state = "between"

    def _end(self, status: str, response: dict[str, Any]) -> None:
        assert self._state in (("failing",) if status == "failed" else ("between",)), self._state
        assert (response["status"], response["output"]) == (status, self.items)
        assert (response["error"] is None) == (status != "failed")
        assert (response["incomplete_details"] is None) == (status != "incomplete")
        changing = {"status", "output", "usage", "completed_at", "error", "incomplete_details"}
        assert not self._created or response.keys() == self._created.keys()
        for name in self._created.keys() - changing:
            assert response[name] == self._created[name], name
        if status != "failed":
            usage = response["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        self.response, self._state = response, "ended"

    def check_ended(self) -> None:
        assert self._state == "ended"


class MessageOrder:
    """The events of the Messages protocol."""

    def __init__(self) -> None:
        self._state = "nothing"
        self._text: list[str] = []
        #: the message, with the blocks that have ended
        self.message: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None

    def take(self, name: str | None, data: str) -> None:
        event = json.loads(data)
        kind = event["type"]
        assert name == kind
        assert self._state not in ("ended", "failed"), f"{kind} behind the end"
        if kind == "ping":
            assert self._state != "nothing"
        elif kind == "error":
            self.error, self._state = event["error"], "failed"
        elif kind == "message_start":
            assert self._state == "nothing"
            self.message, self._state = event["message"], "between"
            assert (self.message["content"], self.message["stop_reason"]) == ([], None)
        elif kind.startswith("content_block_"):
            self._block(kind.removeprefix("content_block_"), event)
        elif kind == "message_delta":
            assert self._state == "between"
            self.message |= event["delta"] | {"usage": event["usage"]}
            assert self.message["stop_reason"] is not None
            self._state = "stopped"
        else:
            assert (kind, self._state) == ("message_stop", "stopped")
            self._state = "ended"

    def _block(self, kind: str, event: dict[str, Any]) -> None:
        content = self.message["content"]
        if kind == "start":
            assert (self._state, event["index"]) == ("between", len(content))
            block = event["content_block"]
            assert not any(block.get(name) for name in ("text", "thinking", "input"))
            content.append(block)
            self._text, self._state = [], "block"
            return
        assert (self._state, event["index"]) == ("block", len(content) - 1)
        field = _DELTAS[content[-1]["type"]]
        if kind == "delta":
            delta = event["delta"]
            types = {"partial_json": "input_json_delta", "text": "text_delta", "thinking": "thinking_delta"}
            assert delta["type"] == types[field]
            self._text.append(delta[field])
            return
        assert kind == "stop"
        text = "".join(self._text)
        if field == "partial_json":
            try:
                content[-1]["input"] = json.loads(text or "{}")
            except ValueError:
                content[-1]["input"] = {"INVALID_JSON": text}
        else:
            content[-1][field] = text
        self._state = "between"

    def check_ended(self) -> None:
        assert self._state in ("ended", "failed")
