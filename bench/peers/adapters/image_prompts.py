"""Images and questions by number, the same for every library."""

from __future__ import annotations

from typing import Any

WIDTH, HEIGHT = 1024, 512
#: characters of a question
QUESTION = 32


def picture(number: int) -> Any:
    """uint8 [height, width, 3]."""
    import numpy as np

    return np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


def question(number: int) -> str:
    """A text that begins unlike others; a token is a letter."""
    return f"{number:08d} what does this show?".ljust(QUESTION, ".")
