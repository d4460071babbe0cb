"""Incremental detokenization: token ids in, one at a time; text out, in whole characters.

**Invariant.** The concatenated texts of all pushes and of ``finish`` are the part of
``decode(prompt + output)`` after ``decode(prompt)``, so a completion keeps its leading space. A released
piece is final. A character with missing bytes is held back and not released as U+FFFD.

*A prompt that ends inside a character.* The two texts differ from the incomplete character on, and the
output begins where they differ: with the whole character if the first output tokens complete it, without
another U+FFFD for it if they do not. No other text of the prompt is repeated.

*Exception.* Decoders with byte fallback (Llama 2) turn a whole run of byte tokens into U+FFFD as soon as one
byte of it is invalid, characters that were released before included. The released text remains, and the
tokens after it are decoded separately. In a run like this the number of U+FFFD may differ; a U+FFFD that
the model generated counts as invalid bytes.

The held text is bounded: of a run of invalid bytes, all but the last few are released as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["DecodeStreamDetokenizer", "Detokenizer", "OffsetDetokenizer"]

_REPLACEMENT = "\ufffd"
#: Prompt tokens that give the first output token its context (leading spaces).
_CONTEXT = 6
#: A character has at most four bytes, so an incomplete one has at most three tokens or U+FFFD.
_UNFINISHED = 3
#: Tokens held back for whole characters; more than this are invalid bytes.
_MAX_HELD = 12


class Detokenizer(Protocol):
    """The text of one output."""

    def push(self, token_id: int) -> str:
        """Append a token; returns the text that became final with it, possibly empty."""

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        """The held text and the text of ``token_ids`` as if they came next; does not change the state.

        ``apart``: only the text of ``token_ids``, which follow unknown tokens. U+FFFD stands for an
        incomplete character.
        """

    def finish(self) -> str:
        """End of the output: the held text, with U+FFFD for an incomplete character. Idempotent."""


class OffsetDetokenizer:
    """Decodes a short window of tokens and releases the new text; works with any decode function.

    The window consists of context tokens, whose text was released, and of the tokens whose text is held back.
    On release the held tokens become the next context, which therefore starts with a whole character.
    """

    __slots__ = ("_context_text", "_decode", "_num_context", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        """``decode`` keeps or omits special tokens, as the output does."""
        self._decode = decode
        self._use_context(_context(prompt_ids, decode))

    def push(self, token_id: int) -> str:
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        if text.endswith(_REPLACEMENT):
            return self._release_broken(text) if len(window) - self._num_context > _MAX_HELD else ""
        new = self._unreleased(text, window)
        if new:
            # Behind an incomplete character, the first of these tokens may be its last bytes only.
            whole = self._context_text.endswith(_REPLACEMENT)
            self._use_context(window if whole else window[self._num_context :])
        elif len(window) - self._num_context > _MAX_HELD:
            # Some decoders omit an incomplete character. This many tokens without text are not one: they are
            # omitted special tokens, or ids outside the vocabulary.
            del window[self._num_context]
        return new

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        window = [*(self._window[: self._num_context] if apart else self._window), *token_ids]
        return self._unreleased(self._decode(window), window)

    def finish(self) -> str:
        window = self._window
        new = self._unreleased(self._decode(window), window) if len(window) > self._num_context else ""
        self._use_context([])
        return new

    @property
    def context(self) -> list[int] | None:
        """The tokens from which the next one can be decoded, or None while text is held back."""
        open_end = len(self._window) > self._num_context or self._context_text.endswith(_REPLACEMENT)
        return None if open_end else self._window

    def _use_context(self, tokens: list[int]) -> None:
        self._window = tokens
        #: number of context tokens in the window, and their released text
        self._num_context = len(tokens)
        self._context_text = self._decode(tokens)

    def _unreleased(self, text: str, window: list[int]) -> str:
        """The part of ``text``, the text of ``window``, that was not released."""
        released = self._context_text
        if text.startswith(released):
            return text[len(released) :]
        if released.endswith(_REPLACEMENT):
            return text[_common(released, text) :]
        return self._decode(window[self._num_context :])

    def _release_broken(self, text: str) -> str:
        """Release the text that no further byte can change, and shorten the window."""
        unreleased = self._unreleased(text, self._window)
        settled = _without_unfinished(unreleased)
        held = len(unreleased) - len(settled)
        self._window = self._window[-_MAX_HELD:]
        self._num_context = _MAX_HELD - _UNFINISHED
        shown = self._decode(self._window)
        self._context_text = shown[: max(0, len(shown) - held)]
        return settled


class DecodeStreamDetokenizer:
    """Decodes with the ``DecodeStream`` of the tokenizers library, in less than a microsecond per token.

    DecodeStream has no flush, repeats a prompt that ends inside a character, raises "Invalid prefix" where
    earlier text changes, and holds back U+FFFD and tokens without text at a cost that grows with their
    number. In these cases an :class:`OffsetDetokenizer` takes over until its text is final.
    """

    __slots__ = ("_decode", "_held", "_last", "_skip", "_slow", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        """``tokenizer`` is a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        #: the tokens of the last release, and the tokens after them
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
            # The library raises the bare Exception here.
            return self._take_over()
        if text is None:
            return self._take_over() if len(held) > _MAX_HELD else ""
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
        """Push the held tokens through the slow path; returns their final text."""
        self._slow = slow = OffsetDetokenizer(self._decode, self._last)
        text = "".join([slow.push(token) for token in self._held])
        self._held = []
        self._resume()
        return text

    def _resume(self) -> None:
        """Return to the fast path if no text is held back."""
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
        # Four lengths: a context that begins inside a character looks invalid although the prompt is valid.
        for count in range(_CONTEXT, _CONTEXT + 4):
            whole = list(prompt_ids[max(0, end - count) : end])
            if not decode(whole).endswith(_REPLACEMENT):
                return list(prompt_ids[end:]) if unfinished else whole
    return list(prompt_ids[-_CONTEXT:])


def _without_unfinished(text: str) -> str:
    """The text without the trailing U+FFFD that further bytes may complete."""
    for _ in range(_UNFINISHED):
        text = text.removesuffix(_REPLACEMENT)
    return text


def _common(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
