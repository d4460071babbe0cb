"""Images of Pillow, which is an optional dependency, and their colours."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["pillow", "upright"]

#: tag of EXIF
_ORIENTATION = 0x0112
#: pixels that are composed at a time
_PART = 1 << 20


def pillow(field: str) -> ModuleType:
    """Pillow's module of images. Raises InvalidRequest: it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        message = "images need the package Pillow: pip install aioinfer[images]"
        raise InvalidRequest(field, message, code="unsupported_parameter") from error
    return Image


def upright(image: Image) -> Image:
    """An image of Pillow in mode RGB, turned as its EXIF data say, and composed on white where it is
    transparent; the image itself if that is all so. Other modes are converted as ``convert_to_rgb`` of
    transformers does; so values of 16 bits are cut off above 255. Raises what Pillow raises."""
    from PIL import ImageOps

    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image) -> Image:
    """In parts of whole rows, since each takes three times the memory of the result."""
    from PIL import Image

    width, height = image.size
    found, rows = Image.new("RGB", image.size), max(1, _PART // width)
    for top in range(0, height, rows):
        above = image.crop((0, top, width, min(height, top + rows))).convert("RGBA")
        below = Image.new("RGBA", above.size, (255, 255, 255, 255))
        found.paste(Image.alpha_composite(below, above).convert("RGB"), (0, top))
    return found
