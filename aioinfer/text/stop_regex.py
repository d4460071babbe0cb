"""StopRegex: finds stop patterns in streamed text, in bounded time and with a bounded buffer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import regex

from aioinfer.ledger import ByteCache
from aioinfer.text.costs import MOST_NODES, written_out
from aioinfer.text.stop import StopStrings, TooSlow

__all__ = ["StopRegex", "check_pattern"]

#: A match begins at most this many characters before the end of the text; earlier text is released.
_WINDOW = 512
#: Released characters kept for lookbehind and ``\b``. More than 0, so that ``^`` is the start of the output.
_CONTEXT = 64
#: seconds of this thread's CPU time per token for the patterns of one output
_BUDGET = 0.005
#: bytes that a compiled pattern takes at most: at least, and for each node
_LEAST_SIZE, _NODE_SIZE = 4096, 200


#: patterns of earlier requests
_kept: ByteCache[str, regex.Pattern[str]] = ByteCache("stop patterns", 16 << 20)


class StopRegex:
    """Searches for the patterns, and for plain strings next to them, after every piece of text.

    Of several matches the one that ends first wins, of equals the one that begins first. A pattern is matched
    against the text so far: ``a+`` matches a single ``a`` at the end of a piece, ``$`` is the end of that
    text. A possible prefix of a match, according to the library's partial matching, is held back,
    up to the last 512 characters. (Partial matching ignores the characters that an approximate pattern may
    skip before its first one, so they can be released before a match.)
    """

    __slots__ = ("_buffer", "_ended", "_node", "_patterns", "_released", "_strings", "matched")

    def __init__(self, patterns: Sequence[str], strings: Sequence[str] = ()) -> None:
        """Raises ValueError as :func:`check_pattern` does."""
        self._patterns = [(source, check_pattern(source)) for source in patterns]
        #: the plain strings, and how far the text is in them
        self._strings = StopStrings.of(strings)
        self._node = 0
        #: the end of the text: released context up to ``_released``, then the held text
        self._buffer = ""
        self._released = 0
        self._ended = False
        #: the text of the match
        self.matched = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Append text: returns the text to release, and the pattern or string that matched, if any.

        After a match nothing is released and nothing is found. Raises TooSlow if a pattern takes too long;
        the object cannot be used any more then.
        """
        if self._ended:
            return "", None
        before = len(self._buffer)
        self._buffer += text
        self._node, end, string = self._strings.advance(self._node, text)
        hold = len(self._buffer) - self._strings.depth(self._node)
        first, stop = (len(self._buffer) + 1, 0), None
        budget = _Budget()
        for source, pattern in self._patterns:
            match = budget.search(source, pattern, self._buffer, self._released)
            if match is None:
                continue
            if match.partial:
                hold = min(hold, match.start())
            elif (match.end(), match.start()) < first:
                first, stop, self.matched = (match.end(), match.start()), source, match.group()
        if string is not None and (before + end, before + end - len(string)) < first:
            first, stop, self.matched = (before + end, before + end - len(string)), string, string
        if stop is not None:
            safe = self._buffer[self._released : first[1]]
            self._ended, self._buffer, self._released = True, "", 0
            return safe, stop
        hold = max(hold, len(self._buffer) - _WINDOW)
        safe = self._buffer[self._released : hold]
        cut = max(0, hold - _CONTEXT)
        self._buffer, self._released = self._buffer[cut:], hold - cut
        return safe, None

    @property
    def held(self) -> str:
        """The held text: a possible prefix of a match."""
        return self._buffer[self._released :]

    def flush(self) -> str:
        """End of the output: the held text; empty after a match."""
        held = self._buffer[self._released :]
        self._released = len(self._buffer)
        return held


class _Budget:
    """The CPU time left for one piece of text."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = time.thread_time() + _BUDGET

    def search(
        self, source: str, pattern: regex.Pattern[str], text: str, start: int
    ) -> regex.Match[str] | None:
        """A match from ``start`` on; if there is none, a partial one at the end. Raises TooSlow."""
        # The library's timeout counts the CPU time of the whole process. While other threads compute, it
        # expires early, and the search is repeated with more until this thread has used its budget.
        timeout = _BUDGET
        while True:
            try:
                return pattern.search(text, pos=start, partial=True, timeout=timeout)
            except TimeoutError:
                if time.thread_time() >= self._end:
                    raise TooSlow(f"{source!r} takes too long on this output") from None
                timeout *= 2


def check_pattern(source: str) -> regex.Pattern[str]:
    """Compile an untrusted pattern.

    Raises:
        ValueError: it is malformed, too large once its repeats are unrolled, matches the empty text
            (which would end every output before it begins), or searches backwards.
    """
    if (pattern := _kept.get(source)) is not None:
        return pattern
    if (size := written_out(source)) > MOST_NODES:
        raise ValueError("is too large with its repeats unrolled")
    try:
        pattern = regex.compile(source, cache_pattern=False)
        empty = pattern.search("", timeout=_BUDGET)
    except TimeoutError:
        raise ValueError("takes too long on the empty text") from None
    except Exception as error:
        # The library raises several types for malformed patterns.
        raise ValueError(f"is not a regular expression: {error}") from None
    if pattern.flags & regex.REVERSE:
        raise ValueError("searches backwards")
    if empty is not None:
        raise ValueError("matches the empty text")
    _kept.put(source, pattern, _LEAST_SIZE + _NODE_SIZE * size)
    return pattern
