"""Decoding of images, with Pillow: to RGB in 8 bits, upright, on white."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest, Rejected, why
from aioinfer.images.pixels import pillow, upright
from aioinfer.images.source import ImageLimits, ImageSource
from aioinfer.ledger import LEDGER

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMATS", "decoded"]

#: those that are decoded
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
#: begins a scan of a JPEG file; each is decoded over all of its pixels
_SCAN = b"\xff\xda"
_MAX_SCANS = 100
#: What several pictures in a file are in time. Cameras put further ones, such as a preview, into JPEG files.
_MOVING = frozenset({"GIF", "PNG", "WEBP"})
#: what decoding and resizing take of the memory for a pixel, roughly; and images for which nobody asks
_PIXEL_BYTES = 16
_SMALL = 1 << 25


def decoded(source: ImageSource, limits: ImageLimits, field: str) -> Image:
    """An image of mode RGB. Blocks.

    Nothing but the head of a file is read before its size is known. Raises InvalidRequest, by the name
    ``field``: it is damaged, no image of ``FORMATS``, animated, or too large; and Rejected: there is no
    memory left for it.
    """
    images = pillow(field)
    if source.size is not None:
        limits.check_size(source.size, field)
        found: Image = images.frombytes("RGB", source.size, source.data)
        return found
    limits.check_bytes(len(source.data), field)
    try:
        with images.open(io.BytesIO(source.data), formats=FORMATS) as image:
            limits.check_size(image.size, field)
            _check_memory(image.size)
            if image.format == "JPEG" and source.data.count(_SCAN) > _MAX_SCANS:
                raise InvalidRequest(field, f"the image has more than {_MAX_SCANS} scans")
            if image.format in _MOVING and getattr(image, "n_frames", 1) > 1:
                raise InvalidRequest(field, "the image is animated: give one picture of it")
            return upright(image)
    except (InvalidRequest, Rejected):
        raise
    except Exception as error:  # any kind: a file can be anything
        raise InvalidRequest(field, f"the image cannot be decoded: {_told(error)}") from error


def _check_memory(size: tuple[int, int]) -> None:
    needed = size[0] * size[1] * _PIXEL_BYTES
    if needed > _SMALL and (left := LEDGER.short(needed)) is not None:
        raise Rejected(f"no memory is left for an image of {size[0]} x {size[1]}: {LEDGER.said(left)}")


def _told(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"it is no {', '.join(FORMATS)}"
    return why(error) or type(error).__name__
