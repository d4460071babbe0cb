"""What adapters have in common, without a framework."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioinfer import InvalidRequest
from aioinfer.chat.results import ChatDelta, ToolCall
from aioinfer.integrations import calls
from aioinfer.text.tool_calls import ToolCallDelta


def _deltas(*parts: ToolCallDelta) -> Iterator[ChatDelta]:
    return (ChatDelta("", "", [each], None, None) for each in parts)


def test_calls_are_put_together_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = calls.ToolCall
    monkeypatch.setattr(calls, "ToolCall", lambda *each: made.append(each[0]) or real(*each))
    said = calls.SoFar()
    parts = [ToolCallDelta(0, "a", "look", '{"n'), *(ToolCallDelta(0, arguments="n") for _ in range(50))]
    parts += [
        ToolCallDelta(0, arguments='": 1}'),
        ToolCallDelta(1, "b", "stop"),
        ToolCallDelta(1, arguments="{}"),
    ]
    for delta in _deltas(*parts):
        said.add(delta)
    assert made == []
    assert said.tool_calls == [ToolCall("a", "look", '{"' + "n" * 51 + '": 1}'), ToolCall("b", "stop", "{}")]
    assert made == ["a", "b"]


def test_a_setting_chooses_among_tools() -> None:
    class Either:
        function_tools = ("look",)

    class Neither:
        function_tools = ()

    tools, outputs = ["look", "read", "end"], ["end"]
    for choice, text, found in (
        (None, True, ("auto", tools)),
        ("auto", False, ("required", tools)),
        ("required", True, ("required", tools)),
        ("none", False, ("required", outputs)),
        ([], True, ("auto", outputs)),
        (["read", "other"], True, ("required", ["read"])),
        (Either(), False, ("required", ["look", "end"])),
        (Neither(), True, ("auto", outputs)),
    ):
        assert calls.chosen(choice, tools, outputs, text=text) == found
    assert calls.chosen("none", ["look"], [], text=True) == ("none", ["look"])
    assert calls.chosen(Neither(), ["look"], [], text=True) == (None, [])
    for choice, offered in ("required", []), (["other"], ["look"]):
        with pytest.raises(InvalidRequest, match="tool_choice: no tool is left to call"):
            calls.chosen(choice, offered, [], text=True)
