"""What all parsers of reasoning are: they tell thoughts from the answer around them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

__all__ = ["Answer", "Calls", "Found", "ReasoningParser"]


class Found(Protocol):
    """Content and calls of a piece of text; ``before``: the length of the content before the first call."""

    content: str
    before: int

    @property
    def calls(self) -> Sequence[object]: ...


class Calls(Protocol):
    """What the parsers of calls do, as far as thoughts need it."""

    def push(self, text: str) -> Found:
        """Parse the next piece."""

    def finish(self) -> Found:
        """End the text."""

    @property
    def unfinished(self) -> bool:
        """The arguments of a call are incomplete."""


class Answer(Protocol):
    """What a parser of reasoning writes to, in the order of the output."""

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts with which a call can begin."""

    def draft(self) -> Calls:
        """A further parser of calls, for text that may not be a part of the answer."""

    @property
    def quoted(self) -> bool:
        """The newest text is within a string of the arguments of a call."""

    def think(self, text: str) -> None:
        """A part of the reasoning."""

    def write(self, text: str) -> None:
        """A part of the answer: content and calls."""

    def call(self, text: str) -> None:
        """A part of a message for a tool. Without tools there is nobody to read it."""

    def takes(self, tag: str) -> bool:
        """A tag of reasoning comes next in the answer, and is left out. False if it is a part of a call or of
        code: it was written then."""


class ReasoningParser(ABC):
    """Text in, reasoning and answer out; their concatenations do not depend on how the text is split.

    Attributes:
        name: the setting's value.
        opening, closing: the tags around a thought.
        header: text after the opening tag that belongs to it.
        opened: where the output begins if the prompt does not show it: within reasoning (True), or with an
            opening tag if there is reasoning (None).
        tags: what has to be in the text, even if a vocabulary has special tokens for it.
        into: what is written to; set before the first text.
    """

    name: ClassVar[str]
    opening: ClassVar[str]
    header: ClassVar[str] = ""
    closing: ClassVar[str]
    opened: ClassVar[bool | None] = None
    tags: ClassVar[tuple[str, ...]]
    into: Answer

    def __init__(self, prompt_end: str = "") -> None:
        """``prompt_end``: the last characters of the prompt."""
        self._opened = self.opened_by(prompt_end)
        self._held = ""

    @classmethod
    def in_template(cls, template: str) -> bool:
        """A chat template knows this format."""
        return cls.closing in template

    @classmethod
    def opened_by(cls, prompt_end: str) -> bool | None:
        """The beginning of an output after this end of a prompt: within reasoning (True), with content, since
        the prompt has closed it (False), or with an opening tag if there is reasoning (None)."""
        end = prompt_end.rstrip()
        if end.endswith(cls.opening) or (cls.header and end.endswith(cls.opening + cls.header)):
            return True
        # Templates close it at once where a variable switches thinking off.
        return False if end.endswith(cls.closing) else cls.opened

    @classmethod
    def begun(cls, text: str) -> bool | None:
        """A thought begins at the end of a text that began outside thoughts; None: more of it decides."""
        at = text.rfind(cls.opening)
        if at < 0:
            return False
        header = f"{cls.header}\n" if cls.header else ""
        rest = text[at + len(cls.opening) :]
        return None if rest != header and header.startswith(rest) else True

    @classmethod
    def ended(cls, text: str) -> int:
        """The place in a text that began within a thought where that ends; -1: it does not."""
        return text.find(cls.closing)

    @classmethod
    def closing_in(cls, templates: Iterable[str]) -> str:
        """The closing tag with the line breaks around it, as these chat templates write it."""
        breaks = r"(?:\\n|\n)*"
        literals = re.compile(rf"""(?<=['"]){breaks}{re.escape(cls.closing)}{breaks}(?=['"])""")
        found = (each.replace(r"\n", "\n") for text in templates for each in literals.findall(text))
        return max(found, key=len, default=cls.closing)

    @abstractmethod
    def push(self, text: str) -> None:
        """Read the next piece of output."""

    @abstractmethod
    def finish(self) -> str:
        """End the output: what was held back is written, or returned if it has to be pushed once more, since
        only the end showed how to read it. It is bounded how often that happens."""

    @abstractmethod
    def answering(self, following: str) -> bool:
        """Text that comes next belongs to the answer."""
