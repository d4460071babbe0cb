"""Incremental detokenization: token ids in, one at a time; text out, never half a character.

**The promise.** The texts of all pushes and of ``finish`` together are what ``decode(prompt + output)`` has
beyond ``decode(prompt)``, so a completion keeps its leading space. No piece is ever taken back, and a
character whose bytes are still arriving is held back and not shown as U+FFFD.

*A prompt that ends inside a character.* The two texts then differ from the unfinished character on, and
the output begins where they differ: with the whole character if its first tokens complete it, and without
another U+FFFD for it if they do not. Nothing else of the prompt is said again.

*Where the promise has no meaning.* Decoders with byte fallback (Llama 2) turn a whole run of byte tokens
into U+FFFD once one byte of it is wrong, also characters that were delivered long before. Those stay, and
what follows is decoded by itself. In such a run the number of U+FFFD may differ; one that the model wrote
itself looks like broken bytes and counts as such.

Nothing waits for ever: of a run of broken bytes, all but the last few are released as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["DecodeStreamDetokenizer", "Detokenizer", "OffsetDetokenizer"]

_REPLACEMENT = "\ufffd"
#: Prompt tokens that give the first output token its context (leading spaces).
_CONTEXT = 6
#: A character has at most four bytes: while it is incomplete, at most three tokens or U+FFFD are it.
_UNFINISHED = 3
#: So many tokens are held back in the hope of whole characters; more of them must be broken bytes.
_PATIENCE = 12


class Detokenizer(Protocol):
    """The text of one output."""

    def push(self, token_id: int) -> str:
        """One more token; returns the text that became final with it, often none."""

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        """The text that is held back, and that of some tokens as if they came next; changes nothing.

        ``apart``: only theirs, behind others that are not known. U+FFFD stands for half a character.
        """

    def finish(self) -> str:
        """No more tokens: the rest, with U+FFFD for a character that was never completed. Idempotent."""


class OffsetDetokenizer:
    """Decodes a short window of tokens and takes what is new; works with any decode function.

    The window is some context, whose text has been said, and the tokens whose text is still held back.
    With every release those become the context of the next, so that it starts with a whole character.
    """

    __slots__ = ("_decode", "_known", "_said", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        """``decode`` keeps special tokens or leaves them out, as the output shall."""
        self._decode = decode
        self._use_context(_context(prompt_ids, decode))

    def push(self, token_id: int) -> str:
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        if text.endswith(_REPLACEMENT):
            return self._release_broken(text) if len(window) - self._known > _PATIENCE else ""
        new = self._unsaid(text, window)
        if new:
            # After an open end, the first of these tokens may only be the rest of a character.
            whole = self._said.endswith(_REPLACEMENT)
            self._use_context(window if whole else window[self._known :])
        elif len(window) - self._known > _PATIENCE:
            # Some decoders show an unfinished character as nothing, but so many tokens without text are
            # none: special ones left out, or ids that the tokenizer does not have.
            del window[self._known]
        return new

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        window = [*(self._window[: self._known] if apart else self._window), *token_ids]
        return self._unsaid(self._decode(window), window)

    def finish(self) -> str:
        window = self._window
        new = self._unsaid(self._decode(window), window) if len(window) > self._known else ""
        self._use_context([])
        return new

    @property
    def context(self) -> list[int] | None:
        """The tokens from which the next one can be decoded, or None while text is held back."""
        open_end = len(self._window) > self._known or self._said.endswith(_REPLACEMENT)
        return None if open_end else self._window

    def _use_context(self, tokens: list[int]) -> None:
        self._window = tokens
        #: how many tokens of the window have been dealt with, and how much of its text
        self._known = len(tokens)
        self._said = self._decode(tokens)

    def _unsaid(self, text: str, window: list[int]) -> str:
        """What ``text``, that of a window, has beyond what was said."""
        said = self._said
        if text.startswith(said):
            return text[len(said) :]
        if said.endswith(_REPLACEMENT):
            return text[_common(said, text) :]
        return self._decode(window[self._known :])

    def _release_broken(self, text: str) -> str:
        """Release what no further byte can change, and shorten the window."""
        unsaid = self._unsaid(text, self._window)
        settled = _without_unfinished(unsaid)
        held = len(unsaid) - len(settled)
        self._window = self._window[-_PATIENCE:]
        self._known = _PATIENCE - _UNFINISHED
        shown = self._decode(self._window)
        self._said = shown[: max(0, len(shown) - held)]
        return settled


class DecodeStreamDetokenizer:
    """The same by the ``DecodeStream`` of the tokenizers library, in less than a microsecond per token.

    That stream has no flush, repeats a prompt that ends inside a character, raises "Invalid prefix" where
    text changes in hindsight, and holds back U+FFFD and textless tokens at a cost that grows with their
    number. In all these cases an :class:`OffsetDetokenizer` takes over until its text is settled.
    """

    __slots__ = ("_decode", "_held", "_last", "_skip", "_slow", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        """``tokenizer`` is a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        #: the tokens of the last release, and those since
        self._last: list[int] = []
        self._held: list[int] = []
        self._slow: OffsetDetokenizer | None = OffsetDetokenizer(self._decode, prompt_ids)
        self._stream: Any = None
        self._resume()

    def push(self, token_id: int) -> str:
        if self._slow is not None:
            settled = self._slow.push(token_id)
            self._resume()
            return settled
        held = self._held
        held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The library has no exception class of its own for this.
            return self._take_over()
        if text is None:
            return self._take_over() if len(held) > _PATIENCE else ""
        self._last = held
        self._held = []
        return text

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        slow = self._slow
        if slow is not None:
            return slow.peek(token_ids, apart=apart)
        slow = OffsetDetokenizer(self._decode, self._last)
        if apart:
            return slow.peek(token_ids, apart=True)
        return "".join([slow.push(token) for token in self._held]) + slow.peek(token_ids)

    def finish(self) -> str:
        text = self._take_over() if self._held else ""
        if self._slow is not None:
            text += self._slow.finish()
            self._resume()
        return text

    def _take_over(self) -> str:
        """Push what is held back through the slow path; returns what of it is final."""
        self._slow = slow = OffsetDetokenizer(self._decode, self._last)
        text = "".join([slow.push(token) for token in self._held])
        self._held = []
        self._resume()
        return text

    def _resume(self) -> None:
        """Back to the fast path if no text is held back."""
        assert self._slow is not None
        context = self._slow.context
        if context is not None:
            from tokenizers.decoders import DecodeStream

            self._last = context
            self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)
            self._slow = None


def _context(prompt_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """The last few tokens of the prompt; if it ends inside a character, the tokens of that character."""
    for unfinished in range(_UNFINISHED + 1):
        end = len(prompt_ids) - unfinished
        # Four lengths, because one that begins inside a character may look broken where the prompt is not.
        for count in range(_CONTEXT, _CONTEXT + 4):
            whole = list(prompt_ids[max(0, end - count) : end])
            if not decode(whole).endswith(_REPLACEMENT):
                return list(prompt_ids[end:]) if unfinished else whole
    return list(prompt_ids[-_CONTEXT:])


def _without_unfinished(text: str) -> str:
    """All but the trailing U+FFFD that may still become a character."""
    for _ in range(_UNFINISHED):
        text = text.removesuffix(_REPLACEMENT)
    return text


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
