"""OutputText: the text of one request, from token ids to final pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from aioinfer.text.byte_level import ByteLevelDetokenizer
from aioinfer.text.content_stops import ContentStops, Matcher
from aioinfer.text.stop import StopMatcher

if TYPE_CHECKING:
    from aioinfer.text.detokenizer import Detokenizer
    from aioinfer.text.reader import AnswerReader

__all__ = ["UNKNOWN", "OutputText"]

#: placeholder of an unknown token
UNKNOWN = "\N{LIGHT SHADE}"


class _LateStops:
    """A matcher whose matches are text like any other while ``early()``. Matches do not overlap."""

    __slots__ = ("_early", "_make", "_matcher")

    def __init__(self, make: Callable[[], Matcher], early: Callable[[], bool]) -> None:
        self._make = make
        self._matcher = make()
        self._early = early

    @property
    def matched(self) -> str:
        return self._matcher.matched

    @property
    def held(self) -> str:
        return self._matcher.held

    def push(self, text: str) -> tuple[str, str | None]:
        if not self._early():
            return self._matcher.push(text)
        released = ""
        # Patterns have their time per search: of a piece of text no more than two.
        for _ in range(2):
            held = self._matcher.held
            safe, stop = self._matcher.push(text)
            if stop is None:
                return released + safe, None
            safe += self._matcher.matched
            released, text = released + safe, (held + text)[len(safe) :]
            self._matcher = self._make()
        return released + text, None

    def flush(self) -> str:
        return self._matcher.flush()


class OutputText:
    """Detokenizer, then stop matcher; runs on the event loop, once per token.

    Attributes:
        costly: stop patterns are searched: a push may take milliseconds instead of microseconds.
        pieces: the released text as non-empty pieces. The list only grows: a reader keeps an index into it.
        enabled: there is a detokenizer. An engine without a tokenizer produces no text.
        texts: by token id, what the next :meth:`push` appends to ``pieces``; where it has an entry that is
            not None, appending that, unless it is empty, is the whole push. None if it has to be called.
    """

    __slots__ = (
        *("_detokenizer", "_ended", "_include_stop", "_matcher", "_table", "_to_come"),
        *("costly", "enabled", "pieces", "texts"),
    )

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        stop_regex: Sequence[str] = (),
        answer: AnswerReader | None = None,
        min_tokens: int = 0,
    ) -> None:
        """``answer``: stops are looked for in its content. ``min_tokens``: what these complete is no stop."""
        self.enabled = detokenizer is not None
        self.costly = self.enabled and bool(stop_regex)
        self.pieces: list[str] = []
        self._detokenizer = detokenizer
        self._matcher: Matcher | ContentStops | None = None
        if stop or stop_regex:
            make: Callable[[], Matcher] = partial(_matcher, stop, stop_regex)
            if min_tokens:
                make = partial(_LateStops, make, self._is_early)
            self._matcher = make() if answer is None else ContentStops(make, answer)
        self._include_stop = include_stop
        #: tokens that are still to come before a stop ends the output
        self._to_come = min_tokens + 1
        self._ended = False
        self._table: ByteLevelDetokenizer | None = None
        self.texts: Sequence[str | None] | None = None
        if isinstance(detokenizer, ByteLevelDetokenizer) and self._matcher is None:
            self._table, self.texts = detokenizer, detokenizer.texts

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self.pieces)

    def push(self, token_id: int) -> str | None:
        """Append an output token; returns the stop string or pattern that it completed, if any.

        The token that ends an output is pushed only if its text is included. Raises TooSlow if a
        stop pattern takes too long.
        """
        if self._detokenizer is None or self._ended:
            return None
        self._to_come -= 1
        text = self._detokenizer.push(token_id)
        if self._table is not None:
            self.texts = self._table.texts
        return self._release(text) if text else None

    def skip(self, token_ids: Sequence[int]) -> bool:
        """Go on as if these had been pushed to this text, which is new, but without their text, and at once.
        False, and nothing is changed, where all of them have to be pushed for that."""
        if self._table is None:
            return self._detokenizer is None
        self._table.skip(token_ids)
        self.texts = self._table.texts
        return True

    def finish(self) -> str | None:
        """End of the output: release the held text. Idempotent. Raises TooSlow.

        The detokenizer's held text passes the stop matcher, too: returns the stop string or pattern that it
        completes, if any.
        """
        if self._detokenizer is None or self._ended:
            return None
        self.texts = None
        text = self._detokenizer.finish()
        stop = self._release(text) if text else None
        if stop is None and isinstance(self._matcher, ContentStops):
            stop = self._found(*self._matcher.settle())
        if stop is None and self._matcher is not None:
            self._append(self._matcher.flush())
        self._ended = True
        return stop

    def ahead(self, token_ids: Sequence[int | None]) -> str:
        """The text after the released text if these tokens came next: the held text and the tokens' text.

        U+2591 stands for each token that is None and for an incomplete character. Stop strings are not
        searched. Does not change the state.
        """
        if self._detokenizer is None:
            return ""
        parts = ["" if self._matcher is None else self._matcher.held]
        if not token_ids or token_ids[0] is None:
            parts.append(self._detokenizer.peek([]))
        for number, (_, run) in enumerate(groupby(token_ids, lambda token: token is None)):
            tokens = list(run)
            known = [token for token in tokens if token is not None]
            parts.append(self._detokenizer.peek(known, apart=number > 0) if known else UNKNOWN * len(tokens))
        return "".join(parts).replace("\N{REPLACEMENT CHARACTER}", UNKNOWN)

    def _is_early(self) -> bool:
        return self._to_come > 0

    def _release(self, text: str) -> str | None:
        if self._matcher is None:
            self._append(text)
            return None
        return self._found(*self._matcher.push(text))

    def _found(self, safe: str, stop: str | None) -> str | None:
        """Release what a matcher releases."""
        if stop is not None and self._matcher is not None:
            self._ended = True
            if self._include_stop:
                safe += self._matcher.matched
        self._append(safe)
        return stop

    def _append(self, text: str) -> None:
        if text:
            self.pieces.append(text)


def _matcher(stop: Sequence[str], stop_regex: Sequence[str]) -> Matcher:
    """One matcher for all stop strings and patterns."""
    if not stop_regex:
        return StopMatcher(stop)
    # Loads the regex library, which most outputs do not use.
    from aioinfer.text.stop_regex import StopRegex

    return StopRegex(stop_regex, stop)
