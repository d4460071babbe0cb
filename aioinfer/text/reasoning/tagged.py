"""Reasoning between two tags, wherever a model writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from aioinfer.text.reasoning.base import ReasoningParser
from aioinfer.text.reasoning.drafts import Draft
from aioinfer.text.tags import Tags, tags_of, without_breaks

__all__ = ["DeepSeekR1", "Gemma4", "Mistral", "Qwen3", "Tagged"]

#: maximum white space before a tag at the beginning
_MOST_SPACE = 64


class Tagged(ReasoningParser):
    """Thoughts between two tags.

    A thought may begin anywhere in the answer, but not within a call or within code, and it may repeat its
    opening tag. A closing tag that closes nothing is left out; the text before it was content already. Line
    breaks next to a tag belong to it, unless only they separate what is before a thought from what is after
    it. There is a line break between two thoughts.

    A thought that is never closed ends where a call begins; one that is closed may contain drafts of calls.
    So what looks like a call within a thought is held back until a tag or the end of the output decides.
    Otherwise only a possible prefix of a tag is held back.

    Attributes:
        framing: tags around the answer, which are left out as well.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    tags: ClassVar[tuple[str, ...]] = (opening, closing)
    framing: ClassVar[tuple[str, ...]] = ()

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__(prompt_end)
        self._state: Callable[[], bool] = self._thought if self._opened else self._begin
        self._around = tags_of(self.opening, self.closing, *self.framing)
        self._closings = tags_of(self.closing)
        self._within: Tags | None = None
        self._draft: Draft | None = None
        #: the last character of the answer so far
        self._last = ""
        #: some reasoning was passed on; more needs a line break before it
        self._thought_before = self._apart = False

    def push(self, text: str) -> None:
        self._held += text
        while self._state():
            pass

    def finish(self) -> str:
        held, self._held = self._held, ""
        if self._state in (self._begin, self._answer):
            self._write(held)
        elif self._state == self._drafting:
            return self._end_draft(held)
        elif self._state != self._closed:
            self._think_on(held)
        return ""

    def answering(self, following: str) -> bool:
        if self._state == self._closed and not self._separate:
            return not following.startswith("\n")
        outside = self._state in (self._begin, self._closed, self._answer)
        return outside and not (self._held + following).startswith(self._around.all)

    # -- the answer ------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Before the first text: white space before a tag belongs to it."""
        start = self._held.lstrip()
        if len(self._held) - len(start) <= _MOST_SPACE:
            if any(tag.startswith(start) and tag != start for tag in self._around.all):
                return False
            if start.startswith(self._around.all):
                self._held = start
        return self._go(0, self._answer)

    def _answer(self) -> bool:
        at, tag = self._around.find(self._held)
        self._write(self._held[:at])
        if not tag:
            self._held = self._held[at:]
            return False
        if self.into.takes(tag):
            return self._go(at + len(tag), self._header if tag == self.opening else self._closed)
        self._last = tag[-1]
        return self._go(at + len(tag), self._answer)

    def _closed(self) -> bool:
        """Behind a tag."""
        if not self._separate:
            self._held = self._held.lstrip("\n")
        return bool(self._held) and self._go(0, self._answer)

    @property
    def _separate(self) -> bool:
        """Line breaks that come next separate two parts of the answer."""
        return self._last not in ("", "\n")

    # -- thoughts --------------------------------------------------------------------------------------

    def _header(self) -> bool:
        if len(self._held) < len(self.header) and self.header.startswith(self._held):
            return False
        return self._go(len(self.header) if self._held.startswith(self.header) else 0, self._thought)

    def _thought(self) -> bool:
        """At the beginning of a thought."""
        self._held = self._held.lstrip("\n")
        start = self._held.lstrip()
        if len(self._held) - len(start) <= _MOST_SPACE:
            if start.startswith(self.opening):
                return self._go(len(self._held) - len(start) + len(self.opening), self._header)
            if self.opening.startswith(start):
                return False
        self._apart = self._thought_before
        self._draft = None
        return self._go(0, self._thinking)

    def _thinking(self) -> bool:
        if self._within is None:
            self._within = tags_of(self.closing, *self.into.openings)
        at, tag = self._within.find(self._held)
        text = without_breaks(self._held[:at])
        self._think_on(text)
        if not tag:
            self._held = self._held[len(text) :]
            return False
        if tag == self.closing:
            return self._go(at + len(tag), self._closed)
        return self._go(len(text), self._drafting)

    def _drafting(self) -> bool:
        """Within a thought, behind what may begin a call."""
        draft = self._draft = self._draft or Draft(self.into.draft(), self.closing)
        at, tag = self._closings.find(self._held)
        if at and not draft.called:
            # By character, so that the end of what is no call is found wherever the text is split.
            at, tag = 1, ""
        self._think_on(draft.push(self._held[:at]))
        self._held = self._held[at + len(tag) :]
        if tag:
            self._think_on(without_breaks(draft.close()))
        if draft.closed:
            return self._go(0, self._closed)
        if draft.empty:
            self._state = self._thinking
        return bool(at or tag) and bool(self._held)

    def _end_draft(self, held: str) -> str:
        assert self._draft is not None
        self._think_on(self._draft.push(held))
        thought, rest = self._draft.end()
        self._think_on(thought)
        # What is left is read once more, not again and again.
        self._within = self._closings
        self._state = self._closed if self._draft.closed else self._answer
        return rest

    def _think_on(self, text: str) -> None:
        if not text:
            return
        self.into.think("\n" + text if self._apart else text)
        self._thought_before, self._apart = True, False

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self.into.write(text)

    def _go(self, upto: int, state: Callable[[], bool]) -> bool:
        self._held = self._held[upto:]
        self._state = state
        return True


class Qwen3(Tagged):
    """The output contains both tags, or neither if it has no reasoning, unless the prompt has opened it."""

    name = "qwen3"


class DeepSeekR1(Tagged):
    """The output begins with reasoning unless the prompt has closed it."""

    name = "deepseek-r1"
    opened = True


class Mistral(Tagged):
    """``[THINK]...[/THINK]``: the output contains both tags, or neither if it has no reasoning."""

    name = "mistral"
    opening = "[THINK]"
    closing = "[/THINK]"
    tags = (opening, closing)


class Gemma4(Tagged):
    """``<|channel>thought`` and a line break, the reasoning, ``<channel|>``: the output contains both tags,
    or neither if it has no reasoning. Where thinking is switched off, templates may close it in the prompt.
    """

    name = "gemma4"
    opening = "<|channel>"
    header = "thought"
    closing = "<channel|>"
    tags = (opening, closing)


class SeedOss(Tagged):
    """``<seed:think>...</seed:think>``; ``<seed:cot_budget_reflect>`` within is reasoning."""

    name = "seed-oss"
    opening = "<seed:think>"
    closing = "</seed:think>"
    tags = (opening, closing)


class MinimaxM3(Tagged):
    """``<mm:think>...</mm:think>``; a closing tag alone begins an answer without reasoning."""

    name = "minimax-m3"
    opening = "<mm:think>"
    closing = "</mm:think>"
    tags = (opening, closing)


class HunyuanV3(Tagged):
    """``<think:opensource>...</think:opensource>``: Hunyuan 3, whose template puts its tags together."""

    name = "hunyuan-v3"
    opening = "<think:opensource>"
    closing = "</think:opensource>"
    tags = (opening, closing)

    @classmethod
    def in_template(cls, template: str) -> bool:
        return cls.closing in template or ("</think{}>" in template and ":opensource" in template)


class HunyuanA13B(Tagged):
    """As Qwen 3, with the answer in ``<answer>...</answer>``."""

    name = "hunyuan-a13b"
    framing = ("<answer>", "</answer>")

    @classmethod
    def in_template(cls, template: str) -> bool:
        return cls.closing in template and cls.framing[0] in template


class Ernie45(Tagged):
    """As Qwen 3, with the answer in ``<response>...</response>``: ERNIE 4.5 and Granite 3.3."""

    name = "ernie45"
    framing = ("<response>", "</response>")

    @classmethod
    def in_template(cls, template: str) -> bool:
        # MiniMax M2 writes results of calls so.
        return cls.closing in template and cls.framing[0] in template and "<minimax:" not in template


class Granite(Tagged):
    """Two sentences as tags: Granite 3.2."""

    name = "granite"
    opening = "Here is my thought process:"
    closing = "Here is my response:"
    tags = (opening, closing)


class Apriel(Tagged):
    """``Here are my reasoning steps:``, which the prompt can end with, ``[BEGIN FINAL RESPONSE]``."""

    name = "apriel"
    opening = "Here are my reasoning steps:"
    closing = "[BEGIN FINAL RESPONSE]"
    framing = ("[END FINAL RESPONSE]",)
    tags = (opening, closing, *framing)


class Apertus(Tagged):
    """``<|inner_prefix|>...<|inner_suffix|>``."""

    name = "apertus"
    opening = "<|inner_prefix|>"
    closing = "<|inner_suffix|>"
    tags = (opening, closing)


class Solar(Tagged):
    """``<|think|>...<|end|>``, then the answer as a message of its own: Solar Open."""

    name = "solar"
    opening = "<|think|>"
    closing = "<|end|>"
    framing = ("<|begin|>assistant", "<|content|>")
    tags = (opening, closing, "<|begin|>", "<|content|>")

    @classmethod
    def in_template(cls, template: str) -> bool:
        return cls.opening in template and cls.framing[0] in template


class Cohere(Tagged):
    """``<|START_THINKING|>...<|END_THINKING|>``, then the answer between tags: Command R7B, Command A."""

    name = "cohere"
    opening = "<|START_THINKING|>"
    closing = "<|END_THINKING|>"
    framing = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    tags = (opening, closing, *framing)


class KimiK3(Tagged):
    """``<|open|>think<|sep|>...<|close|>think<|sep|>``, then the answer between tags of the same kind."""

    name = "kimi-k3"
    opening = "<|open|>think<|sep|>"
    closing = "<|close|>think<|sep|>"
    framing = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    tags = ("<|open|>", "<|close|>", "<|sep|>")

    @classmethod
    def in_template(cls, template: str) -> bool:
        return "<|open|>" in template and "open_tag('think')" in template
