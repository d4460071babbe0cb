"""ImageSource: an image as its caller gave it, copied."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ImageSource"]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The bytes of an image."""

    #: an image file; with ``size``, pixels of RGB in 8 bits, row by row
    data: bytes
    #: width and height
    size: tuple[int, int] | None = None
