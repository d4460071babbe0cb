"""Parsers of reasoning between tags: they split an answer into the reasoning and the content after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from aioinfer.text.tags import partial_length, without_breaks

__all__ = ["DeepSeekR1", "Gemma4", "Mistral", "Qwen3", "ReasoningParser"]

#: maximum white space before the opening tag
_MOST_SPACE = 64
#: reasoning and content
_Split = tuple[str, str]


class ReasoningParser:
    """Text in, (reasoning, content) out; the concatenation does not depend on how the text is split.

    Reasoning can only be at the beginning: a later tag is content. Line breaks next to a tag belong to it.
    Only a possible prefix of a tag is held back.

    Attributes:
        name: the setting's value.
        opening, closing: the tags around the reasoning.
        header: text after the opening tag that belongs to it.
        opened: where the output begins if the prompt does not show it: within reasoning (True), or with an
            opening tag if there is reasoning (None).
        tags: what has to be in the text, even if a vocabulary has special tokens for it.
    """

    name: ClassVar[str]
    opening: ClassVar[str] = "<think>"
    header: ClassVar[str] = ""
    closing: ClassVar[str] = "</think>"
    opened: ClassVar[bool | None]
    tags: ClassVar[tuple[str, ...]] = (opening, closing)

    def __init__(self, prompt_end: str = "") -> None:
        """``prompt_end``: the last characters of the prompt."""
        self._opened = self.opened_by(prompt_end)
        self._held = ""
        self._state: Callable[[], _Split] = self._answer if self._opened is False else self._begin

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

    def push(self, text: str) -> _Split:
        """Split the next piece of output."""
        self._held += text
        return self._state()

    def finish(self) -> _Split:
        """End the output: the held text."""
        held, self._held = self._held, ""
        within = self._state in (self._think, self._skip_header)
        thinking = within or (self._opened and self._state == self._begin)
        return (held, "") if thinking else ("", held)

    def _begin(self) -> _Split:
        start = self._held.lstrip()
        if len(self._held) - len(start) <= _MOST_SPACE:
            if start.startswith(self.opening):
                self._held = start[len(self.opening) :]
                return self._to(self._skip_header)
            if self.opening.startswith(start):
                return "", ""
        return self._to(self._think if self._opened else self._answer)

    def _skip_header(self) -> _Split:
        if len(self._held) < len(self.header) and self.header.startswith(self._held):
            return "", ""
        self._held = self._held.removeprefix(self.header)
        return self._to(self._skip_to_think)

    def _skip_to_think(self) -> _Split:
        self._held = self._held.lstrip("\n")
        return self._to(self._think) if self._held else ("", "")

    def _think(self) -> _Split:
        at = self._held.find(self.closing)
        if at >= 0:
            reasoning = without_breaks(self._held[:at])
            self._held = self._held[at + len(self.closing) :]
            return reasoning, self._to(self._skip_to_answer)[1]
        end = len(self._held) - partial_length(self._held, self.closing)
        reasoning = without_breaks(self._held[:end])
        self._held = self._held[len(reasoning) :]
        return reasoning, ""

    def _skip_to_answer(self) -> _Split:
        self._held = self._held.lstrip("\n")
        return self._to(self._answer) if self._held else ("", "")

    def _answer(self) -> _Split:
        content, self._held = self._held, ""
        return "", content

    def _to(self, state: Callable[[], _Split]) -> _Split:
        self._state = state
        return state()


class Qwen3(ReasoningParser):
    """The output contains both tags, or neither if it has no reasoning, unless the prompt has opened it."""

    name = "qwen3"
    opened = None


class DeepSeekR1(ReasoningParser):
    """The output begins with reasoning unless the prompt has closed it.

    A repeated opening tag at the start of the output is omitted.
    """

    name = "deepseek-r1"
    opened = True


class Mistral(ReasoningParser):
    """``[THINK]...[/THINK]``: the output contains both tags, or neither if it has no reasoning."""

    name = "mistral"
    opening = "[THINK]"
    closing = "[/THINK]"
    opened = None
    tags = (opening, closing)


class Gemma4(ReasoningParser):
    """``<|channel>thought`` and a line break, the reasoning, ``<channel|>``: the output contains both tags,
    or neither if it has no reasoning. Where thinking is switched off, templates may close it in the prompt.
    """

    name = "gemma4"
    opening = "<|channel>"
    header = "thought"
    closing = "<channel|>"
    opened = None
    tags = (opening, closing)
