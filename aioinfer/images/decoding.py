"""Decoding of images, with Pillow: to RGB in 8 bits, upright, on white."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest, Rejected, why
from aioinfer.images.limits import ImageLimits
from aioinfer.images.pixels import pillow, upright
from aioinfer.images.source import ImageSource
from aioinfer.ledger import LEDGER

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMATS", "decoded", "told"]

#: those that are decoded
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
#: begins a scan of a JPEG file; each is decoded over all of its pixels
_SCAN = b"\xff\xda"
_MAX_SCANS = 100
#: segments of a JPEG file in front of its pixels; Pillow keeps each as an object
_MAX_SEGMENTS = 4096
#: bytes of EXIF data, as a segment has at most. Entries may overlap: Pillow before 13 takes up to the square
#: of these bytes, and any release joins segments one by one.
_MAX_EXIF = 1 << 16
#: markers of JPEG without a length
_ALONE = frozenset([0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)])
#: where Pillow has the EXIF data of a file
_EXIF = ("exif", "Raw profile type exif")
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
    if source.data.startswith(b"\xff\xd8"):
        _check_jpeg(source.data, field)
    try:
        with images.open(io.BytesIO(source.data), formats=FORMATS) as image:
            limits.check_size(image.size, field)
            _check_memory(image.size)
            if image.format in _MOVING and getattr(image, "is_animated", False):
                raise InvalidRequest(field, "the image is animated: give one picture of it")
            image.load()  # behind the pixels of a PNG file may be more
            if any(len(image.info.get(name, "")) > _MAX_EXIF for name in _EXIF):
                raise _too_much_exif(field)
            return upright(image)
    except (InvalidRequest, Rejected):
        raise
    except Exception as error:  # any kind: a file can be anything
        raise InvalidRequest(field, f"the image cannot be decoded: {told(error)}") from error


def _check_jpeg(data: bytes, field: str) -> None:
    """Raise InvalidRequest for a JPEG file whose head alone costs Pillow much, or with too many scans."""
    if data.count(_SCAN) > _MAX_SCANS:
        raise InvalidRequest(field, f"the image has more than {_MAX_SCANS} scans")
    at = segments = exif = 0
    while (at := data.find(b"\xff", at)) >= 0 and (marker := data[at + 1 : at + 2]) not in (b"", _SCAN[1:]):
        if marker == b"\xff" or marker[0] in _ALONE:
            at += 1 + (marker != b"\xff")
            continue
        size = max(2, int.from_bytes(data[at + 2 : at + 4]))
        if data.startswith(b"\xff\xe1", at) and data.startswith(b"Exif\0\0", at + 4):
            exif += size
        if exif > _MAX_EXIF:
            raise _too_much_exif(field)
        segments += 1
        if segments > _MAX_SEGMENTS:
            raise InvalidRequest(field, f"the image has more than {_MAX_SEGMENTS} segments in its head")
        at += 2 + size


def _too_much_exif(field: str) -> InvalidRequest:
    return InvalidRequest(field, f"the image has more than {_MAX_EXIF} bytes of EXIF data")


def _check_memory(size: tuple[int, int]) -> None:
    needed = size[0] * size[1] * _PIXEL_BYTES
    if needed > _SMALL and (left := LEDGER.short(needed)) is not None:
        raise Rejected(f"no memory is left for an image of {size[0]} x {size[1]}: {LEDGER.said(left)}")


def told(error: Exception) -> str:
    """What an error of a library says, and its type if that is nothing."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"it is no {', '.join(FORMATS)}"
    return why(error) or type(error).__name__
