"""Templates of token ids, and requests with them."""

from __future__ import annotations

import random
from typing import Any

from aioinfer.params import DiffusionParams
from tests.engine.block_parity import Asked, to_the_end

Template = list[int | None]


def templates(size: int, pin: int) -> list[Template]:
    """Pins and holes at all sorts of places: the ends of blocks, whole blocks, the first and the last."""
    hole: Template = [None]
    return [
        hole * 3,
        [pin] + hole * (size - 1),
        hole * 2 + [pin] * 3 + hole,
        [pin] * (2 * size + 1) + hole,
        hole + [pin] * (3 * size) + hole * 2,
        [None, pin] * (size + 1),
        hole * (2 * size) + [pin],
        hole * size + [pin] * size + hole * size + [pin] * 2,
        [pin, pin + 1] + hole * (size + 2) + [pin],
    ]


def pinned_requests(algorithm: str, size: int, vocab_size: int, **options: Any) -> list[Asked]:
    """Each template behind prompts that end around a block's end; some go on behind it, or end within."""
    rng = random.Random(algorithm)
    asked: list[Asked] = []
    for length in (1, size - 1, size, size + 3):
        for template in templates(size, 9):
            more = rng.choice([0, 0, 0, 2, size + 1, -1])
            most = max(1, len(template) + more)
            params = to_the_end(DiffusionParams(algorithm=algorithm), most, template=template, **options)
            asked.append((rng.choices(range(10, vocab_size), k=length), params))
    return asked
