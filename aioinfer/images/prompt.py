"""Images as a part of a prompt.

The positions of an image hold *words* in place of token ids: negative numbers of 32 bits, a function of the
image and of how many they are. So whatever tells prompts apart by their ids (the prefix cache, names of
pages, placing, checkpoints) tells images apart::

    ids      17   5   -81 -9077 -512 -63   9   22        word_i = i-th 31 bits of SHAKE-128(image), negated
                      └── unit 0 ──────┘                  a unit: what the encoder computes at a time

Where an id must be one of the vocabulary, :func:`shown` puts the model's image token there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from aioinfer.images.source import ImageSource
    from aioinfer.ledger import Share

__all__ = ["ImageUnit", "PromptImages", "shown", "words"]


@dataclass(frozen=True, slots=True, eq=False)
class ImageUnit:
    """An image, or a tile of one: what the encoder computes at a time."""

    #: the first of its positions in the prompt, and how many there are
    start: int
    length: int
    #: names its features: a function of the image, the processor and the number of the unit
    key: bytes
    #: positions that the encoder computes
    patches: int
    #: arrays that only the model's encoder understands
    pixels: Mapping[str, npt.NDArray[np.generic]]

    @property
    def stop(self) -> int:
        """The position behind it."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt, in their order."""

    sources: tuple[ImageSource, ...]
    #: by their first positions
    units: tuple[ImageUnit, ...]
    #: int32 [3, prompt]: time, height and width of each position of the prompt; None without M-RoPE
    rotary: npt.NDArray[np.int32] | None = None
    #: what is added to a position behind the prompt, then
    delta: int = 0
    #: the model's image token
    token_id: int = 0
    #: of the memory, as long as this is held
    shares: tuple[Share, ...] = ()

    def shown(self, ids: Sequence[int]) -> list[int]:
        """The ids with the image token in place of words."""
        return shown(ids, self.token_id)


def words(digest: bytes, count: int) -> list[int]:
    """The ids of the ``count`` positions of an image: int32, negative."""
    import numpy as np

    bits = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), np.uint32)
    found: list[int] = (bits | np.uint32(1 << 31)).view(np.int32).tolist()
    return found


def shown(ids: Sequence[int], token_id: int) -> list[int]:
    """The ids with the model's image token in place of words."""
    return [token if token >= 0 else token_id for token in ids]
