"""Images of Pillow, which is an optional dependency, and their colours."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["pillow", "upright"]


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
    transparent. Other modes are converted as ``convert_to_rgb`` of transformers does; so values of 16 bits
    are cut off above 255. Raises what Pillow raises."""
    from PIL import Image, ImageOps

    image.load()
    turned = ImageOps.exif_transpose(image)
    if "A" not in turned.getbands() and turned.info.get("transparency") is None:
        return turned.convert("RGB")
    above = turned.convert("RGBA")
    below = Image.new("RGBA", above.size, (255, 255, 255, 255))
    return Image.alpha_composite(below, above).convert("RGB")
