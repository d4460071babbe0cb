"""ThinkingBudget: a limit of the tokens of thought in an output."""

from __future__ import annotations

import copy
import re
from typing import Self

from aioinfer.steering.processors import Ids, Logits
from aioinfer.text.reasoning import Harmony, ReasoningParser
from aioinfer.text.tokenizer import Tokenizer

__all__ = ["ThinkingBudget"]

#: a line or a sentence ends here
_END = re.compile(r"""(?:\n|[.!?…。！？]["'”’)\]*_`]*)\s*$""")
#: characters of the text that are looked at: more than a tag and the header of a message can have
_WINDOW = 256


class ThinkingBudget:
    """A logits processor that closes the thought of an output when it has ``budget`` tokens.

    Every token behind the opening tag and its header counts, drafts of calls included, until a closing tag is
    whole. The budget is one for all thoughts of an output: if it is spent, a further thought is closed where
    it begins. With a ``grace``, up to that many tokens follow, until one that ends a line or a sentence. Then
    ``end`` and the closing tag are forced, with the line breaks around it of the chat template; an ``end``
    that has the tag stands alone. A thought that ends by itself changes nothing.

    Tags are found as the parsers of :mod:`aioinfer.text.reasoning` find them, except that those within the
    arguments of a call are tags as well. O(1) per token.
    """

    __slots__ = (
        *("_alone", "_at", "_before", "_budget", "_form", "_forced", "_grace", "_ids", "_literal"),
        *("_spent", "_tail", "_texts", "_tokenizer", "_within"),
    )

    def __init__(
        self,
        form: type[ReasoningParser],
        tokenizer: Tokenizer,
        budget: int,
        *,
        grace: int = 0,
        end: str = "",
        prompt_end: str = "",
        alone: bool = False,
    ) -> None:
        """``form``: the format of thoughts; ``prompt_end``: the last characters of the prompt; ``alone``: a
        grammar allows a thought at the beginning only."""
        self._form, self._tokenizer, self._budget, self._grace = form, tokenizer, budget, grace
        self._alone = alone and form is not Harmony
        closing = form.closing_in(tokenizer.chat_templates)
        after = closing.lstrip("\n") if end.endswith("\n") else closing
        text = end if form.closing in end else end + after
        #: what is forced: behind the end of a line, and elsewhere
        self._ids = {
            True: tuple(tokenizer.encode_part(text if end else closing.lstrip("\n"))),
            False: tuple(tokenizer.encode_part(text)),
        }
        #: of this output's tokens
        self._texts: dict[int, str] = {}
        #: tokens of thought, and those before this thought
        self._spent = self._before = 0
        #: the text of this thought, or of what is outside
        self._tail = ""
        #: what is being forced, and how many of it were written
        self._forced: tuple[int, ...] = ()
        self._at = 0
        opened = form.opened_by(prompt_end)
        self._within = opened is True
        if opened and form.header and prompt_end.endswith(form.opening):
            self._within, self._tail = False, form.opening  # the header is still to come
        #: an opening tag that comes next is text
        self._literal = self._alone and opened is False
        self._decide()

    def __call__(self, ids: Ids, logits: Logits) -> tuple[int, ...] | None:
        return self._forced[self._at :] or None

    @property
    def idle(self) -> int:
        """Tokens that may come before it decides anything."""
        return 0 if self._forced else max(0, self._budget - self._spent)

    def accept(self, token: int) -> None:
        text = self._texts.get(token)
        if text is None:
            text = self._tokenizer.token_bytes(token).decode(errors="replace")
            self._texts[token] = text
        self._tail = (self._tail + text)[-_WINDOW:]
        if self._forced:
            if token == self._forced[self._at]:
                self._at += 1
                if self._at == len(self._forced):
                    self._leave("")
                return
            self._forced = ()  # this output goes on otherwise, as a fork of another one may
        if self._within:
            self._think()
        else:
            self._look(text)
        self._decide()

    def copy(self) -> Self:
        return copy.copy(self)

    def _think(self) -> None:
        """Behind a token of thought."""
        at = self._form.ended(self._tail)
        if at >= 0:
            self._leave(self._tail[at:])
        elif self._tail.lstrip() == self._form.opening:  # models repeat the one in the prompt
            self._tail, self._spent = "", self._before
        else:
            self._spent += 1

    def _look(self, text: str) -> None:
        """Behind a token outside thoughts."""
        begun = self._form.begun(self._tail)
        if self._alone:
            lead, opening = self._tail.lstrip(), self._form.opening
            self._literal |= not (lead.startswith(opening) or opening.startswith(lead))
        elif text.count("`") % 2 and self._form is not Harmony:
            self._literal = not self._literal
        if begun:
            self._tail, self._within = "", not self._literal
            self._before = self._spent

    def _leave(self, rest: str) -> None:
        self._tail, self._within, self._literal = rest, False, self._alone
        self._forced, self._at = (), 0

    def _decide(self) -> None:
        """Close the thought, if it is to be."""
        spent, most = self._spent, self._budget + self._grace
        if not self._within or spent < self._budget:
            return
        if not self._tail or spent >= most or _END.search(self._tail):
            self._forced, self._at = self._ids[self._tail.endswith("\n")], 0
