"""FakeImages: images that a scripted engine takes, and does not look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.images.formats.base import ImageParts, UnitPixels

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SEEN", "FakeImages"]

#: the positions of an image, whatever its size
_POSITIONS = 4
_PLACE = "\0"
#: an image in the text of a prompt
SEEN = _PLACE * _POSITIONS


class _Settings:
    """There are none."""

    def to_dict(self) -> dict[str, Any]:
        return {}


class FakeImages:
    """The image format of a tokenizer whose tokens are bytes: a position is a byte that is 0."""

    placeholder = _PLACE
    token_id = 1
    reserved: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.processor: Any = _Settings()

    def parts(self, image: Image) -> ImageParts:
        """Nothing is resized: an encoder would have nothing to compute."""
        return ImageParts(SEEN, (UnitPixels(_POSITIONS, _POSITIONS, {}),))
