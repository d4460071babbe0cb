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
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
#: maximum lookaheads of a pattern, each of which becomes a pattern that all texts have to match
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
    begin = 1  # where a lookahead may be: after "^", or after the one before
    for at, depth in _depths(pattern):
        head = pattern[0] == "^" and pattern.startswith("(?=", begin)
        if head and pattern[at] == ")" and depth == 0:
            # After a lookahead that is repeated or one of several alternatives, it would mean something else.
            if len(heads) == _MOST_HEADS:
                raise ValueError(f"with more than {_MOST_HEADS} lookaheads")
            heads.append(f"^({pattern[begin + 3 : at]})")
            begin = at + 1
            if pattern[begin : begin + 1] in ("*", "+", "?", "{"):
                raise ValueError("with this lookahead")
        elif heads and pattern[at] == "|" and depth <= 0:
            raise ValueError("with this lookahead")
        elif pattern.startswith(_LOOKS, at) and not (head and at == begin):
            raise ValueError("with lookahead or lookbehind but at the beginning, or negative")
    if pattern[0] == "^" and pattern.startswith("(?=", begin):
        raise ValueError("without balanced groups")
    return [f"^{pattern[begin:]}" if heads else pattern, *heads]


def _plain(pattern: str) -> Iterator[int]:
    """The places of characters that are neither escaped nor in a class."""
    at, inside = 0, False
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
            continue
        if inside:
            inside = pattern[at] != "]"
        else:
            yield at
            if pattern[at] == "[":
                inside = True
                # A bracket that comes first in a class is one of its characters.
                at += 2 if pattern[at + 1 : at + 2] == "^" else 1
                if pattern[at : at + 1] == "]":
                    raise ValueError("with a class that begins with a bracket")
                continue
        at += 1


def _depths(pattern: str) -> Iterator[tuple[int, int]]:
    """The places of plain characters, and how many groups are open after each."""
    depth = 0
    for at in _plain(pattern):
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        yield at, depth
