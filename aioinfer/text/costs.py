"""What patterns and numbers may cost: by their text, in linear time, before anything is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "MOST_NODES",
    "Multiple",
    "common_multiple",
    "compiled_size",
    "multiple_of",
    "remainders",
    "written_out",
]

#: maximum nodes of a stop pattern with its repeats unrolled, and of what may force text
MOST_NODES = 10_000
_REPEAT = re.compile(r"(.?)(?:\{\s*+(\d*)\s*+(?:,\s*+(\d*)\s*+)?\}|\+)", re.DOTALL)
#: cost factor of full case folding (to "SS", for example), which turns character sets into sets of texts
_FOLDING_COST = 32
#: The flag ``x``: comments may be within the braces of a repeat.
_COMMENTS = re.compile(r"\(\?[\w-]*x")
#: flags ``f`` or ``V1`` in a group, or a comment before them
_FOLDING = re.compile(r"\(\?[^:()<>=!&|P#]*[fV#]")

_LEAST_SIZE = 1 << 19
#: repeats, each of which becomes many rules
_REPEATS = re.compile(r"\{[\s\d,]++\}")

#: Maximum remainders of ``multipleOf``. llguidance makes a state for each: these take 0.3 s and 30 MB, and no
#: limit of its own counts them.
_MOST_REMAINDERS = 100_000

#: a number as an integer and the digits of it that are behind the point; None: of nothing
Multiple = tuple[int, int] | None


def written_out(pattern: str) -> int:
    """An upper bound of a pattern's nodes after unrolling: all repeats of groups count as nested.

    The bound parses no other syntax, so a pattern cannot be written to evade it.
    """
    if "#" in pattern and _COMMENTS.search(pattern):
        return MOST_NODES + 1
    size, factor = len(pattern), 1
    for found in _REPEAT.finditer(pattern):
        before, low, high = found[1], found[2] or "", found[3] or ""
        if len(low) + len(high) > 9:
            return MOST_NODES + 1
        count = max(int(low or 1), int(high or 1))
        if before.isalnum() or (before and before in "]."):
            size += count
        else:
            # One more for the copy after the counted ones.
            factor = min(factor * (count + 1), MOST_NODES + 1)
    return size * factor * (_FOLDING_COST if _FOLDING.search(pattern) else 1)


def compiled_size(text: str, parts: int) -> int:
    """Bytes that llguidance takes for a grammar, at most; ``parts``: of its schemas when they are merged.

    Measured with the schemas of JSONSchemaBench and with grammars of one kind of part each.
    """
    return _LEAST_SIZE + 240 * len(text) + 1400 * parts + 16_384 * sum(1 for _ in _REPEATS.finditer(text))


def multiple_of(schema: Mapping[str, Any]) -> Multiple:
    """``multipleOf`` of a schema as llguidance reads it, by the same arithmetic; None for what it refuses."""
    given = schema.get("multipleOf")
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < 1 << 32:
        return None
    value, digits = float(given), 0
    while not value.is_integer():
        value, digits = value * 10, digits + 1
    return int(value), digits


def common_multiple(multiples: Iterable[Multiple]) -> Multiple:
    """The least common multiple. Raises ValueError for one with too many remainders."""
    together: Multiple = None
    for each in set(multiples) - {None}:
        assert each is not None
        if together is None:
            together = each
            continue
        digits = max(each[1], together[1])
        one, other = (number * 10 ** (digits - behind) for number, behind in (each, together))
        together = math.lcm(one, other), digits
        _check(together[0])
    return together


def remainders(multiple: Multiple) -> int:
    """The states that a multiple takes: fewer where it ends with zeros. Raises ValueError for too many."""
    if multiple is None:
        return 0
    first = number = multiple[0]
    while number and number % 10 == 0:
        number //= 10
    count = min(first, 1000 * number)
    _check(count)
    return count


def _check(count: int) -> None:
    if count > _MOST_REMAINDERS:
        raise ValueError(f"the keyword 'multipleOf' needs more than {_MOST_REMAINDERS} remainders")
