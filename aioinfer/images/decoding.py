"""Decoding of images, with Pillow: to RGB in 8 bits, upright, on white."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest, why
from aioinfer.images.source import ImageSource

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMATS", "decoded"]

#: those that are decoded; of a file with several pictures the first one is
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
#: begins a scan of a JPEG file; each is decoded over all of its pixels
_SCAN = b"\xff\xda"
_MAX_SCANS = 100


def decoded(source: ImageSource, max_pixels: int, field: str) -> Image:
    """An image of mode RGB. Blocks.

    Of an animation it is the first picture. The orientation that a file states (EXIF) is applied; what is
    transparent is composed on white; other modes are converted as ``convert_to_rgb`` of transformers does:
    16 bits of grey are cut off above 255. Nothing but the file's head is read before its size is known.

    Raises:
        InvalidRequest: by the name ``field``: it is damaged, no image of ``FORMATS``, or has more than
            ``max_pixels`` pixels.
    """
    from PIL import Image, ImageOps

    if source.size is not None:
        _check_size(source.size, max_pixels, field)
        return Image.frombytes("RGB", source.size, source.data)
    try:
        with Image.open(io.BytesIO(source.data), formats=FORMATS) as image:
            _check_size(image.size, max_pixels, field)
            if image.format == "JPEG" and source.data.count(_SCAN) > _MAX_SCANS:
                raise InvalidRequest(field, f"the image has more than {_MAX_SCANS} scans")
            image.load()
            upright = ImageOps.exif_transpose(image)
            if "A" not in upright.getbands() and upright.info.get("transparency") is None:
                return upright.convert("RGB")
            above = upright.convert("RGBA")
            below = Image.new("RGBA", above.size, (255, 255, 255, 255))
            return Image.alpha_composite(below, above).convert("RGB")
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(field, f"the image cannot be decoded: {why(error)}") from error


def _check_size(size: tuple[int, int], max_pixels: int, field: str) -> None:
    width, height = size
    if width * height > max_pixels:
        limit = f"more than {max_pixels} pixels (max_image_pixels)"
        raise InvalidRequest(field, f"the image has {width} x {height}, {limit}")
