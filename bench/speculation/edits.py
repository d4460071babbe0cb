"""Edits: texts as they are and as they should be, thirty pairs, as a client has them that sends a
prediction."""

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
_SETTINGS = """\
{
  "name": "warehouse", "region": "eu-north", "replicas": 3,
  "ports": [8000, 8001, 8002],
  "limits": {"memory": "4GiB", "cores": 2, "files": 4096},
  "owners": ["mira@example.org", "tomas@example.org"],
  "alerts": {"latency_ms": 250, "errors_per_minute": 5, "channel": "operations"}
}
"""
_LETTER = """\
Dear Ms Okafor, thank you for your order of 12 November. Two of the five chairs left our workshop on
Monday and should reach you by Thursday; the other three wait for the oak that our supplier has
promised for the end of the month. If you would rather have all five at once, tell us by Wednesday,
and we will keep the first two until then. The price stays as agreed, and delivery is free. With
kind regards, the workshop.
"""
_NOTES = """\
Minutes of 3 March. Present: Ana, Bilal, Chen, Dora. Ana reports that the pump of the second basin
was replaced and runs quietly. Bilal has measured the water for two weeks: 7.2 at the inlet, 7.6
behind the filter. Chen asks for a budget of 1,400 for new valves, which is granted. Dora will write
to the council about the fence. Next meeting: 7 April.
"""
_PAGE = """\
<article class="card">
  <h2>Evening walks</h2>
  <p>Every Friday from May to September we walk along the river. Bring a lamp and shoes for wet grass.</p>
  <ul>
    <li>Start: the old mill, 19:30</li>
    <li>Length: 6 kilometres, no steep parts</li>
    <li>Guide: Signe, who knows every bat by name</li>
  </ul>
  <a href="/walks/sign-up">Sign up</a>
</article>
"""


def _renamed(text: str, dice: random.Random) -> str:
    """A word is another one wherever it occurs."""
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
    """An extract."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[len(lines) // 2 :])


_EDITS: tuple[Callable[[str, random.Random], str], ...] = (
    *(_renamed, _numbers, _without_a_line, _with_a_line, _second_half),
)
#: (before, after)
PAIRS = [
    (text, edit(text, random.Random(number)))
    for text in (_CODE, _QUERY, _SETTINGS, _LETTER, _NOTES, _PAGE)
    for number, edit in enumerate(_EDITS)
]


def predicted(before: list[int], after: list[int], output: list[int], other: Callable[[], int]) -> list[int]:
    """A prediction that agrees with ``output`` where ``before`` agrees with ``after``, all of them token ids.

    So any output stands for the edited text: what a model of random weights generates, too. ``other`` gives a
    token for each of ``before`` that the edited text does not have.
    """
    found: list[int] = []
    for kind, first, last, start, stop in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        found += output[start:stop] if kind == "equal" else [other() for _ in range(first, last)]
    return found
