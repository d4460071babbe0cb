"""Incremental detokenization: token ids in, one at a time; text out, never half a character.

The promise: the texts of all pushes and of ``finish`` together are what decoding prompt and output at
once would add to decoding the prompt alone. If the prompt ends inside a character, the output starts
with that character's remainder, as U+FFFD where it makes no sense by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Detokenizer", "OffsetDetokenizer", "StreamDetokenizer"]

#: Prompt tokens that give the first output token its context (leading spaces).
_CONTEXT = 6
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one output."""

    def push(self, token_id: int) -> str:
        """One more token; returns the text that became final with it, often none."""

    def finish(self) -> str:
        """No more tokens: the rest, with U+FFFD for a character that was never completed."""


class OffsetDetokenizer:
    """Decodes a short window twice and takes the difference; works with any decode function.

    The two-offset scheme of TGI and vLLM: ids before ``_prefix`` are done with, the text up to ``_read``
    has been emitted, and decoding from ``_prefix`` gives both the context that decoders need.
    """

    __slots__ = ("_decode", "_ids", "_prefix", "_read")

    def __init__(self, decode: Any, prompt_ids: Sequence[int]) -> None:
        """``decode(ids) -> str``, with special tokens kept or left out as wanted."""
        self._decode = decode
        self._ids = list(_context(prompt_ids, decode))
        self._prefix = 0
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        done: str = self._decode(self._ids[self._prefix : self._read])
        text: str = self._decode(self._ids[self._prefix :])
        if len(text) <= len(done) or text.endswith(_REPLACEMENT):
            return ""
        self._prefix = self._read
        self._read = len(self._ids)
        if self._prefix > 4 * _CONTEXT:
            del self._ids[: self._prefix - _CONTEXT]
            self._read -= self._prefix - _CONTEXT
            self._prefix = _CONTEXT
        return text[len(done) :]

    def finish(self) -> str:
        done: str = self._decode(self._ids[self._prefix : self._read])
        text: str = self._decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        return text[len(done) :]


class StreamDetokenizer:
    """The same by the ``DecodeStream`` of the tokenizers library, in about a microsecond per token.

    The library's stream has no flush, holds back a real U+FFFD, and on some inputs raises "Invalid
    prefix"; then, and for the tail, an :class:`OffsetDetokenizer` over the tokens not yet emitted takes
    over.
    """

    __slots__ = ("_decode", "_fallback", "_pending", "_recent", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        """``tokenizer`` is a ``tokenizers.Tokenizer``."""
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        #: the last emitted tokens, as context, and those whose text is still held back
        self._recent = list(_context(prompt_ids, self._decode))
        self._pending: list[int] = []
        self._stream = DecodeStream(ids=self._recent, skip_special_tokens=skip_special_tokens)
        self._fallback: OffsetDetokenizer | None = None

    def push(self, token_id: int) -> str:
        if self._fallback is not None:
            return self._fallback.push(token_id)
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The library knows no exception class of its own here.
            return self._fall_back()[0]
        if text is None:
            if len(self._pending) > _CONTEXT:
                # No character is this long: the bytes are broken, and the stream would hold them for ever.
                return self._fall_back()[0]
            return ""
        self._recent = (self._recent + self._pending)[-_CONTEXT:]
        self._pending = []
        return text

    def finish(self) -> str:
        if self._fallback is None:
            if not self._pending:
                return ""
            text, fallback = self._fall_back()
            return text + fallback.finish()
        return self._fallback.finish()

    def _fall_back(self) -> tuple[str, OffsetDetokenizer]:
        """Hand over; returns the text of the held-back tokens as far as it is final."""
        self._fallback = fallback = OffsetDetokenizer(self._decode, self._recent)
        return "".join(fallback.push(token) for token in self._pending), fallback


def _context(prompt_ids: Sequence[int], decode: Any) -> Sequence[int]:
    """The end of the prompt, if it ends with a whole character, else nothing.

    A few lengths are tried: one that begins inside a character may look broken where the prompt is not.
    """
    for count in range(_CONTEXT, _CONTEXT + 4):
        context = prompt_ids[-count:]
        if not decode(list(context)).endswith(_REPLACEMENT):
            return context
    return []
