"""ImageLimits: what the images of a prompt may have at most."""

from __future__ import annotations

from typing import NamedTuple

from aioinfer.errors import InvalidRequest

__all__ = ["DEFAULT_LIMITS", "ImageLimits"]

#: pixels of JPEG at most. What is longer and thin is resized in minutes, and processors fail on it.
_LONGEST_SIDE = (1 << 16) - 1


class ImageLimits(NamedTuple):
    """What the images of a prompt may have at most."""

    #: images of a prompt
    most: int = 32
    #: bytes of the file of one
    max_bytes: int = 20 << 20
    #: pixels of one
    max_pixels: int = 64 << 20

    def check_size(self, size: tuple[int, int], field: str) -> None:
        """Raise InvalidRequest for an image of more pixels, or of none."""
        width, height = size
        if width < 1 or height < 1:
            raise InvalidRequest(field, "the image is empty")
        if width * height > self.max_pixels:
            limit = f"more than {self.max_pixels} pixels (max_image_pixels)"
            raise InvalidRequest(field, f"the image has {width} x {height}, {limit}")
        if max(size) > _LONGEST_SIDE:
            limit = f"more than {_LONGEST_SIDE} pixels on a side"
            raise InvalidRequest(field, f"the image has {width} x {height}, {limit}")

    def check_bytes(self, count: int, field: str) -> None:
        """Raise InvalidRequest for a file of more bytes, or of none."""
        if not count:
            raise InvalidRequest(field, "the image is empty")
        if count > self.max_bytes:
            limit = f"more than {self.max_bytes} (max_image_bytes)"
            raise InvalidRequest(field, f"the image has {count} bytes, {limit}")


DEFAULT_LIMITS = ImageLimits()
