"""Answers read with a parser of reasoning, one of calls, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from aioinfer.chat.answers import AnswerReader
from aioinfer.text.reasoning import REASONING_PARSERS
from aioinfer.text.tool_calls import PARSERS
from tests.text.call_formats import SCHEMAS, Calls

__all__ = ["Answer", "answer", "deltas", "reader"]


class Answer(NamedTuple):
    """What a client assembles."""

    reasoning: str
    content: str
    calls: Calls
    finish: str


def reader(reasoning: str | None, tools: str | None = None, prompt_end: str = "") -> AnswerReader:
    """A reader of these formats, whose functions are ``SCHEMAS``."""
    return AnswerReader(
        None if tools is None else PARSERS[tools](SCHEMAS),
        None if reasoning is None else REASONING_PARSERS[reasoning](prompt_end),
    )


def deltas(reads: AnswerReader, parts: Iterable[str], *, ended: bool = False) -> list[list[dict[str, Any]]]:
    """The deltas of each part, and of the end."""
    found = []
    for part in parts:
        for _ in reads.read(part, ended=False):
            pass
        found.append(list(reads.deltas()))
    if ended:
        for _ in reads.read("", ended=True):
            pass
        found.append(list(reads.deltas()))
    return found


def answer(
    parts: Iterable[str], reasoning: str | None, tools: str | None = None, prompt_end: str = ""
) -> Answer:
    """The answer whose text comes in these parts."""
    reads = reader(reasoning, tools, prompt_end)
    thought, content = "", ""
    calls: Calls = []
    for each in (delta for part in deltas(reads, parts, ended=True) for delta in part):
        thought += each.get("reasoning_content", "")
        content += each.get("content", "")
        for call in each.get("tool_calls", ()):
            if "id" in call:
                calls.append((call["function"]["name"], ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + call["function"]["arguments"])
    return Answer(thought, content, calls, reads.finish_reason("stop"))
