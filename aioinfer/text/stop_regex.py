"""StopRegex: find stop patterns in streamed text, in bounded time and with a bounded look back."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence

import regex

__all__ = ["StopRegex", "check_pattern"]

#: A match can begin so many characters before the end of the text; what lies further back is released.
_WINDOW = 1024
#: Released characters that lookbehind and ``\b`` still see. More than 0, so that ``^`` is the true start.
_CONTEXT = 64
#: seconds of this thread's CPU time that the patterns of one output may take per token
_BUDGET = 0.005
#: The library unrolls counted repeats, nested ones into one another: nodes that a pattern may grow to.
_MAX_NODES = 10_000
_REPEAT = re.compile(r"(.?)(?:\{(\d*)(?:,(\d*))?\}|\+)", re.DOTALL)
#: Where case may be folded fully (to "SS", say), sets of characters become sets of texts and cost so much.
_FOLDING_COST = 32
#: Flags ``f`` or ``V1`` in a group, or a comment before them.
_FOLDING = re.compile(r"\(\?[^:()<>=!&|P#]*[fV#]")


class StopRegex:
    """Searches for each pattern (and for plain strings beside them) after every piece of text.

    Of several matches the one that ends first wins, of equals the one that begins first. A pattern is
    judged by the text so far: ``a+`` ends it at the first ``a`` that arrives alone, ``$`` is the end of
    what has arrived. Held back is what may be the beginning of a match, as the library's partial
    matching tells, but never more than the last 1,024 characters. (It does not tell of what an approximate
    pattern may skip before its first character, which may be released before such a match.)
    """

    __slots__ = ("_buffer", "_ended", "_patterns", "_released", "matched")

    def __init__(self, patterns: Sequence[str], strings: Sequence[str] = ()) -> None:
        """Raises ValueError as :func:`check_pattern` does."""
        self._patterns = [(source, check_pattern(source)) for source in patterns]
        self._patterns += [(string, _literal(string)) for string in strings]
        #: the end of the text: some context, then what is held back from ``_released`` on
        self._buffer = ""
        self._released = 0
        self._ended = False
        #: the text of the match
        self.matched = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """More text: returns what is safe to release, and the pattern or string that matched, if any.

        After a match nothing more is released and nothing more is found. Raises TimeoutError if a pattern
        takes too long; the text is then beyond use.
        """
        if self._ended:
            return "", None
        self._buffer += text
        start = hold = len(self._buffer)
        first, stop = (len(self._buffer) + 1, 0), None
        budget = _Budget()
        for source, pattern in self._patterns:
            match = budget.search(source, pattern, self._buffer, self._released)
            if match is None:
                continue
            if match.partial:
                hold = min(hold, match.start())
            elif (match.end(), match.start()) < first:
                first, stop = (match.end(), match.start()), source
                start, self.matched = match.start(), match.group()
        if stop is not None:
            safe = self._buffer[self._released : start]
            self._ended, self._buffer, self._released = True, "", 0
            return safe, stop
        hold = max(hold, len(self._buffer) - _WINDOW)
        safe = self._buffer[self._released : hold]
        cut = max(0, hold - _CONTEXT)
        self._buffer, self._released = self._buffer[cut:], hold - cut
        return safe, None

    @property
    def held(self) -> str:
        """What is held back, for it may be the beginning of a match."""
        return self._buffer[self._released :]

    def flush(self) -> str:
        """The output has ended: what was held back is text after all. After a match that is nothing."""
        held = self._buffer[self._released :]
        self._released = len(self._buffer)
        return held


class _Budget:
    """What is left of the time for one piece of text."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = time.thread_time() + _BUDGET

    def search(
        self, source: str, pattern: regex.Pattern[str], text: str, start: int
    ) -> regex.Match[str] | None:
        """A match from ``start`` on; if there is none, a partial one at the end. Raises TimeoutError."""
        # The library's clock is the CPU time of the whole process. While other threads compute, it runs
        # out early, and the search is given more of it until this thread has had its share.
        timeout = _BUDGET
        while True:
            try:
                return pattern.search(text, pos=start, partial=True, timeout=timeout)
            except TimeoutError:
                if time.thread_time() >= self._end:
                    raise TimeoutError(f"stop_regex {source!r} takes too long on this output") from None
                timeout *= 2


@functools.lru_cache(maxsize=256)
def check_pattern(source: str) -> regex.Pattern[str]:
    """Compile a pattern of a stranger.

    Raises:
        ValueError: it is malformed, too large once its repeats are unrolled, matches the empty text
            (which would end every output before it begins), or searches backwards.
    """
    if _nodes(source) > _MAX_NODES:
        raise ValueError("is too large with its repeats unrolled")
    try:
        pattern = regex.compile(source)
        empty = pattern.search("", timeout=_BUDGET)
    except TimeoutError:
        raise ValueError("takes too long on no text at all") from None
    except Exception as error:
        # A library of this size raises many things on what is no pattern.
        raise ValueError(f"is no regular expression: {error}") from None
    if pattern.flags & regex.REVERSE:
        raise ValueError("searches backwards")
    if empty is not None:
        raise ValueError("matches the empty text")
    return pattern


@functools.lru_cache(maxsize=256)
def _literal(string: str) -> regex.Pattern[str]:
    return regex.compile(regex.escape(string))


def _nodes(source: str) -> int:
    """An upper bound of what a pattern is unrolled to: repeats of groups count as if nested, wherever
    they stand. Reading no more of the syntax than that, it cannot be led astray."""
    size, factor = len(source), 1
    for before, low, high in _REPEAT.findall(source):
        if len(low) + len(high) > 9:
            return _MAX_NODES + 1
        count = max(int(low or 1), int(high or 1))
        if before.isalnum() or (before and before in "]."):
            size += count
        else:
            # One more for the part that is repeated no matter how often.
            factor = min(factor * (count + 1), _MAX_NODES + 1)
    return size * factor * (_FOLDING_COST if _FOLDING.search(source) else 1)
