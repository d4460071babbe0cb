"""Images and questions by number, the same for every library."""

from __future__ import annotations

from typing import Any

#: pixels of a side
SIDE = 512
#: characters of a question
QUESTION = 32


def picture(number: int) -> Any:
    """uint8 [512, 512, 3]: what the processor of the model neither resizes nor cuts."""
    import numpy as np

    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def question(number: int) -> str:
    """A text that begins unlike others; a token is a letter."""
    return f"{number:08d} what does this show?".ljust(QUESTION, ".")
