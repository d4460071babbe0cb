"""Wire: how one protocol reads calls and writes answers.

:class:`~aioinfer.server.generation.Generation` takes a request the same way in every protocol; a wire is what
differs::

    bytes --wire.parse--> Call --engine--> streams --AnswerWriter--> events, or one body
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from aioinfer.chat.answers import AnswerReader
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openai.logprobs import Speller
from aioinfer.server.openai.protocol import Call, Served
from aioinfer.text.tokenizer import Tokenizer

__all__ = ["AnswerContext", "AnswerWriter", "PlainEvent", "Wire"]


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The context of a writer of answers, besides the call."""

    tokenizer: Tokenizer | None
    speller: Speller
    #: the parser of every choice; None: its text is content
    readers: Sequence[AnswerReader | None]
    #: token counts of a choice so far, by its index
    usage: Callable[[int], Usage]
    #: token ids of the prompt of a choice
    prompt_ids: Callable[[int], Sequence[int]]

    async def counted(self, usage: Usage, index: int = 0) -> Usage:
        """The token counts of a choice that has been read, those of its reasoning included."""
        reader = self.readers[index]
        return usage if reader is None else await reader.counted(usage, self.tokenizer)


@dataclass(frozen=True, slots=True)
class PlainEvent:
    """The event of a chunk of text, which between ``before`` and ``after`` has the text as a JSON string."""

    before: str
    after: str
    #: of the field ``event``
    name: str | None = None


class AnswerWriter(Protocol):
    """Writes the answer to one call: :meth:`whole`, or from :meth:`open` to :meth:`close` or :meth:`fail`."""

    async def open(self, events: EventStream) -> None:
        """Send the events before the first token."""

    def plain(self, index: int) -> PlainEvent | None:
        """The event that :meth:`chunk` writes for chunks before the last of choice ``index``, if it is one
        each and depends on nothing but the chunk's text; it may then be written without a call of
        :meth:`chunk`. None: call :meth:`chunk`. Asked once, after :meth:`open`."""
        return None

    async def chunk(self, index: int, chunk: Chunk, events: EventStream) -> None:
        """Output of choice ``index``. Of one choice, chunks come in order."""

    async def close(self, usages: Sequence[Usage], events: EventStream) -> None:
        """Send the events after the last chunk; ``usages`` are those of the choices. Ends the events."""

    async def fail(self, failure: Failure, events: EventStream) -> None:
        """The same for an answer that failed: clients must not take it for complete."""

    async def whole(self, results: Sequence[Result]) -> list[bytes]:
        """The body of an answer that is not streamed, in pieces."""


class Wire(NamedTuple):
    """A protocol.

    Attributes:
        parse: makes a call of a body. Raises InvalidRequest, and Refused for another model; may run on a
            worker thread.
        answer: the writer of the answer to one call, when its prompts were accepted. Raises InvalidRequest.
    """

    parse: Callable[[bytes, Served], Call]
    answer: Callable[[Call, AnswerContext], Awaitable[AnswerWriter]]
