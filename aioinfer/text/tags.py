"""Tags in streamed text."""

from __future__ import annotations

__all__ = ["partial_length", "without_breaks"]

#: line breaks that belong to the tag behind them; without a limit a model that writes nothing else would
#: have them held back for ever
_MOST_BREAKS = 64


def partial_length(text: str, tag: str) -> int:
    """How many characters at the end of a text, which does not hold the tag, may be the beginning of it."""
    longest = min(len(text), len(tag) - 1)
    return next(length for length in range(longest, -1, -1) if text.endswith(tag[:length]))


def without_breaks(text: str) -> str:
    """Without the line breaks at the end that belong to a tag, if one follows."""
    return text[: max(len(text.rstrip("\n")), len(text) - _MOST_BREAKS)]
