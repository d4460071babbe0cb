"""The interface of the parsers of tool calls."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

__all__ = ["Parsed", "ToolCallDelta", "ToolCallParser", "WrittenCall", "new_id"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call. The first delta of a call has its id and its name, the others have arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """Content and calls of a piece of output."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class WrittenCall(NamedTuple):
    """The text of a call around its arguments, which belong between ``before`` and ``after``. The tags are
    separate because a tokenizer may have tokens for them."""

    opening: str
    before: str
    after: str
    closing: str


def new_id() -> str:
    """An id of a call, unique across the turns of a conversation."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(Protocol):
    """Text in, content and calls out; the concatenation does not depend on how the text is split.

    Never raises, and every character of the text is either content or part of a call. Arguments are passed on
    as they arrive, so a call remains one even if its arguments are not valid JSON: as with OpenAI's API, the
    receiver validates them.
    """

    name: ClassVar[str]

    def __init__(self) -> None: ...

    @staticmethod
    def in_template(template: str) -> bool:
        """Whether a chat template writes calls in this format."""

    def push(self, text: str) -> Parsed:
        """Parse the next piece of output."""

    def finish(self) -> Parsed:
        """End of the output: the held text."""

    @property
    def unfinished(self) -> bool:
        """The arguments of the newest call are incomplete."""

    @staticmethod
    def write(function: str) -> WrittenCall:
        """The text of a call of ``function``."""
