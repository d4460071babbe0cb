"""What every parser of tool calls takes and gives."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

__all__ = ["Parsed", "ToolCallDelta", "ToolCallParser", "WrittenCall", "new_id"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call. The first delta of a call has its id and its name, the others have arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of output turned out to be."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class WrittenCall(NamedTuple):
    """A call as text: all but its arguments, which go between ``before`` and ``after``. The tags are apart,
    because a tokenizer may have tokens for them."""

    opening: str
    before: str
    after: str
    closing: str


def new_id() -> str:
    """Of a call: no two are alike, also in the next turns of a conversation."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(Protocol):
    """Text in, content and calls out; the sum of it does not depend on how the text was cut.

    Never raises and loses nothing: what is no call is content. Arguments are passed on as they come, so a
    call that has begun stays one, also if its arguments turn out not to be JSON: as with OpenAI's own API,
    who receives them checks them.
    """

    name: ClassVar[str]

    def __init__(self) -> None: ...

    def push(self, text: str) -> Parsed:
        """More of the output."""

    def finish(self) -> Parsed:
        """The output has ended: what was held back."""

    @property
    def unfinished(self) -> bool:
        """The newest call still lacks some of its arguments."""

    @staticmethod
    def write(function: str) -> WrittenCall:
        """How the model is to write a call of a function."""
