"""Logprobs of answers, in the forms of the chat and of the completion endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aioinfer.outputs import TokenLogprob

__all__ = ["ChatLogprobs", "CompletionLogprobs"]

#: a token id as text
Spell = Callable[[int], str]


class ChatLogprobs:
    """A list of entries, each with its most likely alternatives."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell

    def write(self, logprobs: Sequence[TokenLogprob | None], first: int = 0) -> dict[str, Any]:
        """``choices[].logprobs`` of these tokens."""
        content = [
            {
                **self._entry(each.token_id, each.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in each.top],
            }
            for each in logprobs
            if each is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionLogprobs:
    """Parallel lists, with the offset of each token in the text. One object per choice."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._offset = 0

    def write(self, logprobs: Sequence[TokenLogprob | None], first: int = 0) -> dict[str, Any]:
        """``choices[].logprobs`` of these tokens. The first token of a prompt, ``first``, has no logprob: its
        entry is None."""
        tokens, offsets = [], []
        for each in logprobs:
            text = self._spell(each.token_id if each is not None else first)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else each.logprob for each in logprobs],
            "top_logprobs": [
                None if each is None else {self._spell(token): logprob for token, logprob in each.top}
                for each in logprobs
            ],
            "text_offset": offsets,
        }
