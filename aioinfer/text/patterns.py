"""Patterns of JSON schemas in terms of those that llguidance knows: lookaheads at the beginning as patterns
of their own, and white space as ECMAScript has it."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["without_lookahead"]

#: the pattern of pydantic's decimals -> the same without lookahead
_KNOWN = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}
_ESCAPED = re.compile(r"\\.", re.DOTALL)
#: White space has U+FEFF and has not U+0085, other than in Rust. A class may be within another.
_SPACES = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_CLASSES = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
#: maximum lookaheads of a pattern: the time to find them grows with the square of their number
_MOST_HEADS = 16


def without_lookahead(pattern: str) -> list[str]:
    """Patterns without lookahead; a text matches all of them if it matches ``pattern``, and only then.

    Lookaheads directly after a leading ``^`` are such patterns: ``^(?=.*a)b`` is ``^(.*a)`` and ``^b``.
    Raises ValueError for other lookaheads and for lookbehinds.
    """
    if "\\s" in pattern or "\\S" in pattern:
        pattern = _ESCAPED.sub(lambda found: _CLASSES.get(found[0], found[0]), pattern)
    if "(?" not in pattern:
        return [pattern]
    if pattern in _KNOWN:
        return [_KNOWN[pattern]]
    heads: list[str] = []
    rest = pattern
    while rest.startswith("^(?="):
        if len(heads) == _MOST_HEADS:
            raise ValueError(f"with more than {_MOST_HEADS} lookaheads")
        end = _closing(rest)
        inside, after = rest[len("^(?=") : end], rest[end + 1 :]
        # After a lookahead that is repeated or one of several alternatives, it would mean something else.
        if _alternatives(after) or after[:1] in ("*", "+", "?", "{"):
            raise ValueError("with this lookahead")
        heads.append(f"^({inside})")
        rest = f"^{after}"
    for each in (rest, *heads):
        if _looks(each):
            raise ValueError("with lookahead or lookbehind but at the beginning, or negative")
    return [rest, *heads]


def _looks(pattern: str) -> bool:
    """The pattern has a lookahead or lookbehind."""
    return any(
        pattern.startswith(mark, at) for at in _plain(pattern) for mark in ("(?=", "(?!", "(?<=", "(?<!")
    )


def _plain(pattern: str) -> list[int]:
    """The places of characters that are neither escaped nor in a class."""
    found: list[int] = []
    at, inside = 0, False
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
            continue
        if inside:
            inside = pattern[at] != "]"
        else:
            found.append(at)
            if pattern[at] == "[":
                inside = True
                # A bracket that comes first in a class is one of its characters.
                at += 2 if pattern[at + 1 : at + 2] == "^" else 1
                if pattern[at : at + 1] == "]":
                    raise ValueError("with a class that begins with a bracket")
                continue
        at += 1
    return found


def _depths(pattern: str) -> Iterator[tuple[int, int]]:
    """The places of plain characters, and how many groups are open after each."""
    depth = 0
    for at in _plain(pattern):
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        yield at, depth


def _closing(pattern: str) -> int:
    """The end of the first group. Raises ValueError."""
    for at, depth in _depths(pattern):
        if pattern[at] == ")" and depth == 0:
            return at
    raise ValueError("without balanced groups")


def _alternatives(pattern: str) -> bool:
    """The pattern has alternatives outside all groups."""
    return any(pattern[at] == "|" and depth <= 0 for at, depth in _depths(pattern))
