"""Tags in streamed text."""

from __future__ import annotations

import re
from functools import cache

__all__ = ["Tags", "partial_length", "tags_of", "without_breaks"]

#: Maximum line breaks that belong to the tag after them. Without a limit, an output of line breaks only
#: would be held back for ever.
_MOST_BREAKS = 64


class Tags:
    """Finds tags in text that arrives in pieces. No tag may begin with another one."""

    def __init__(self, *tags: str) -> None:
        self.all = tuple(dict.fromkeys(tags))
        self._first = tuple({tag[0] for tag in tags})
        self._pattern = re.compile("|".join(map(re.escape, self.all)))

    def find(self, text: str) -> tuple[int, str]:
        """The place of the first tag, and the tag. Without one: the place of what may become one, or else the
        length of the text, and an empty text."""
        if not any(character in text for character in self._first):
            return len(text), ""
        if found := self._pattern.search(text):
            return found.start(), found[0]
        return len(text) - max(partial_length(text, tag) for tag in self.all), ""


@cache
def tags_of(*tags: str) -> Tags:
    """The tags of a format: made once."""
    return Tags(*tags)


def partial_length(text: str, tag: str) -> int:
    """Length of the longest suffix of a text without the tag that is a proper prefix of the tag."""
    longest = min(len(text), len(tag) - 1)
    return next(length for length in range(longest, -1, -1) if text.endswith(tag[:length]))


def without_breaks(text: str) -> str:
    """The text without its trailing line breaks, which belong to a tag if one follows."""
    return text[: max(len(text.rstrip("\n")), len(text) - _MOST_BREAKS)]
