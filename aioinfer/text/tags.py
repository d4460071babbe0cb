"""Tags in streamed text."""

from __future__ import annotations

__all__ = ["partial_length", "without_breaks"]

#: Maximum line breaks that belong to the tag after them. Without a limit, an output of line breaks only
#: would be held back for ever.
_MOST_BREAKS = 64


def partial_length(text: str, tag: str) -> int:
    """Length of the longest suffix of a text without the tag that is a proper prefix of the tag."""
    longest = min(len(text), len(tag) - 1)
    return next(length for length in range(longest, -1, -1) if text.endswith(tag[:length]))


def without_breaks(text: str) -> str:
    """The text without its trailing line breaks, which belong to a tag if one follows."""
    return text[: max(len(text.rstrip("\n")), len(text) - _MOST_BREAKS)]
