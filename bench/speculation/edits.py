"""Edits: texts as they are and as they should be, as a client has them that sends a prediction."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from difflib import SequenceMatcher

__all__ = ["PAIRS", "predicted"]

_CODE = '''\
class Ledger:
    """Amounts by account, in cents."""

    def __init__(self, currency: str = "EUR") -> None:
        self.currency = currency
        self._amounts: dict[str, int] = {}

    def book(self, account: str, cents: int) -> int:
        """Add to an account; returns its new amount."""
        if not account:
            raise ValueError("an account needs a name")
        amount = self._amounts.get(account, 0) + cents
        self._amounts[account] = amount
        return amount

    def total(self) -> int:
        return sum(self._amounts.values())

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        ordered = sorted(self._amounts.items(), key=lambda item: -item[1])
        return ordered[:count]
'''
_QUERY = """\
SELECT customer.name, COUNT(orders.id) AS number, SUM(orders.cents) AS total
FROM customer
JOIN orders ON orders.customer_id = customer.id
WHERE orders.placed_at >= '2026-01-01' AND orders.state <> 'cancelled'
GROUP BY customer.name
HAVING SUM(orders.cents) > 10000
ORDER BY total DESC
LIMIT 50;
"""
_LETTER = """\
Dear Ms Okafor, thank you for your order of 12 November. Two of the five chairs left our workshop on
Monday and should reach you by Thursday; the other three wait for the oak that our supplier has
promised for the end of the month. If you would rather have all five at once, tell us by Wednesday,
and we will keep the first two until then. The price stays as agreed, and delivery is free. With
kind regards, the workshop.
"""


def _renamed(text: str, dice: random.Random) -> str:
    """Replace a word wherever it occurs."""
    words = sorted(set(re.findall("[a-z]{4,}", text)))
    return text.replace(dice.choice(words), "ledgerline")


def _numbers(text: str, dice: random.Random) -> str:
    return "".join(str((int(each) + dice.randrange(1, 9)) % 10) if each.isdigit() else each for each in text)


def _without_a_line(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    del lines[dice.randrange(1, len(lines) - 1)]
    return "".join(lines)


def _with_a_line(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    lines.insert(dice.randrange(1, len(lines)), "    # added: checked on delivery, twice a week\n")
    return "".join(lines)


def _second_half(text: str, dice: random.Random) -> str:
    """Keep the second half of the lines."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[len(lines) // 2 :])


_EDITS: list[Callable[[str, random.Random], str]] = [
    _renamed, _numbers, _without_a_line, _with_a_line, _second_half,
]  # fmt: skip
#: (before, after)
PAIRS = [
    (text, edit(text, random.Random(number)))
    for text in (_CODE, _QUERY, _LETTER)
    for number, edit in enumerate(_EDITS)
]


def predicted(before: list[int], after: list[int], output: list[int], other: Callable[[], int]) -> list[int]:
    """A prediction that agrees with ``output`` where ``before`` agrees with ``after``, all of them token ids.

    So the output of any model, of random weights too, stands for the edited text. ``other`` gives a token for
    each of ``before`` that the edited text does not have.
    """
    found: list[int] = []
    for kind, first, last, start, stop in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        found += output[start:stop] if kind == "equal" else [other() for _ in range(first, last)]
    return found
