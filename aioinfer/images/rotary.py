"""M-RoPE: positions of time, height and width.

All three of a text's token are the same, one more than the largest before it. Those of an image of R rows and
C columns that begins at p are p, p + row and p + column, and what follows begins at p + max(R, C). See
"Qwen2-VL" (arXiv 2409.12191), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["rotary_positions"]


def rotary_positions(
    count: int, images: Iterable[tuple[int, tuple[int, int]]]
) -> tuple[npt.NDArray[np.int32], int]:
    """The positions int32 [3, count] of a prompt, and what is added to the number of a position behind it.

    ``images``: the first position and the rows and columns of each, in their order.
    """
    found = np.empty((3, count), np.int32)
    at = place = 0
    for start, (rows, columns) in images:
        found[:, at:start] = np.arange(place, place + start - at)
        place += start - at
        at = start + rows * columns
        found[0, start:at] = place
        found[1, start:at] = place + np.repeat(np.arange(rows), columns)
        found[2, start:at] = place + np.tile(np.arange(columns), rows)
        place += max(rows, columns)
    found[:, at:] = np.arange(place, place + count - at)
    return found, place - at
