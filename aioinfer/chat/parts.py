"""Parts: an answer as a sequence of reasoning, texts and calls, for protocols that number them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Part", "Parts", "Step"]


@dataclass(slots=True, eq=False)
class Part:
    """A part of an answer, by its index. Calls have an id and the name of a function; ``pieces`` are its text
    or arguments so far."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """A part begins, has more text, or ends."""

    kind: Literal["begin", "more", "end"]
    part: Part
    text: str = ""


class Parts:
    """Turns the deltas of :class:`~aioinfer.chat.answers.AnswerReader` into parts, one after the other.

    Text after a call is a further part: a part that has ended does not go on.
    """

    def __init__(self) -> None:
        #: all parts so far
        self.all: list[Part] = []
        self._open: Part | None = None

    def read(self, deltas: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
        """The steps of the next deltas."""
        for delta in deltas:
            if reasoning := delta.get("reasoning_content"):
                yield from self._more("reasoning", reasoning)
            if content := delta.get("content"):
                yield from self._more("text", content)
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)

    def text(self, text: str) -> Iterator[Step]:
        """The steps of a further piece of text, which may be empty."""
        return self._more("text", text)

    def end(self, *, with_text: bool = False) -> Iterator[Step]:
        """The end of the answer. ``with_text``: an answer without parts gets an empty text."""
        if with_text and not self.all:
            yield self._begin(Part("text", 0))
        yield from self._end()

    def _more(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._end()
            yield self._begin(Part(kind, len(self.all)))
        yield self._add(text)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Step]:
        function = call["function"]
        if call.get("id") is not None:
            yield from self._end()
            yield self._begin(Part("call", len(self.all), call["id"], function["name"]))
        if function["arguments"]:
            yield self._add(function["arguments"])

    def _begin(self, part: Part) -> Step:
        self.all.append(part)
        self._open = part
        return Step("begin", part)

    def _add(self, text: str) -> Step:
        assert self._open is not None
        self._open.pieces.append(text)
        return Step("more", self._open, text)

    def _end(self) -> Iterator[Step]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield Step("end", ended)
