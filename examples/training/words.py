"""What the tasks of the bundled models are made of: words, random ones too, and which items are held out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One question and its only right answer, or one of many that match a pattern."""

    question: str
    answer: str
    pattern: str | None = None


Tasks = dict[str, tuple[Callable[[random.Random, bool], list[Turn]], float]]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NOUNS = (
    "apple bread chair clock cloud coat coin cup desk door drum fish flag fork gate gift glass gold grape "
    "hat house key lamp leaf map milk moon nest paper pear pen plate rain ring river road rope salt seed "
    "ship shoe snow song spoon star stone sun table tea tent tower train tree wall watch water wheel wind"
).split()
ANIMALS = (
    "bear beaver cat crow deer dog duck fox goat hare horse lion mouse panda rabbit seal swan wolf".split()
)
PLACES = "beach bridge castle cave farm forest garden harbor island lake market meadow mill valley".split()
THINGS = "bell book box crown flute kite ladder lantern letter mirror shell sword ticket whistle".split()
COLORS = "black blue brown golden gray green pink purple red silver white yellow".split()
MOODS = "bright calm cold foggy misty quiet rainy snowy sunny warm windy".split()
CITIES = (
    "Berlin Cairo Dublin Geneva Lima London Lyon Madrid Milan Oslo Paris Prague Rome Tokyo Vienna".split()
)
JOBS = "baker doctor driver farmer lawyer nurse painter pilot sailor singer tailor teacher waiter".split()


def is_held(item: str, share: int) -> bool:
    return zlib.crc32(item.encode()) % 100 < share


def drawn(rng: random.Random, make: Callable[[], str], test: bool, share: int = 10) -> str:
    """An item that belongs to the wanted side of the split."""
    while is_held(item := make(), share) != test:
        pass
    return item


def random_letters(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))


def random_name(rng: random.Random) -> str:
    vowels, consonants = "aeiou", "bcdfghjklmnprstvwz"
    length = rng.randint(4, 6)
    first = rng.randrange(2)
    letters = [rng.choice(vowels if (first + at) % 2 else consonants) for at in range(length)]
    return "".join(letters).capitalize()
