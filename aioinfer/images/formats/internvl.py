"""InternVL: an image is cut into tiles, row by row, and all of it is a further tile behind them.

The text of an image of any number of tiles is one run of positions::

    <img><IMG_CONTEXT><IMG_CONTEXT> ... <IMG_CONTEXT></img>

Source: ``InternVLProcessor`` of transformers, which cuts whatever the settings of the checkpoint say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.images.formats.base import FormatFacts, ImageParts, UnitPixels, pil_processor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Internvl"]

_MODULES = {"GotOcr2ImageProcessor": "got_ocr2"}
_IMAGE, _START, _END = "<IMG_CONTEXT>", "<img>", "</img>"


class Internvl:
    """The format of InternVL3 and InternVL3.5, as transformers has them."""

    placeholder = _IMAGE
    reserved = (_START, _END)

    def __init__(self, facts: FormatFacts) -> None:
        config, vision = facts.config, facts.config.vision_config
        self.token_id = facts.token(_IMAGE)
        if config.image_token_id != self.token_id:
            raise ConfigError(
                f"model: image_token_id of the config is {config.image_token_id}, and {_IMAGE} is "
                f"{self.token_id}"
            )
        self.processor = pil_processor(facts, _MODULES, crop_to_patches=True)
        sizes = [self.processor.size["height"], self.processor.size["width"]]
        if sizes != list(vision.image_size):
            raise ConfigError(f"model: tiles have {sizes} pixels, and its encoder takes {vision.image_size}")
        rows, columns = (size // patch for size, patch in zip(sizes, vision.patch_size, strict=True))
        #: positions that the encoder computes of a tile, one for all of it, and that the prompt has of it
        self._patches = rows * columns + 1
        self._length = int(facts.processor.get("image_seq_length", 256))
        if self._length != rows * columns * config.downsample_ratio**2:
            raise ConfigError(
                f"model: image_seq_length is {self._length}, but a tile has {rows * columns} patches, of "
                f"which {1 / config.downsample_ratio} a side make a position"
            )

    def parts(self, image: Image) -> ImageParts:
        found = self.processor([image], return_tensors="np")
        pixels = np.asarray(found["pixel_values"], np.float32)
        units = tuple(UnitPixels(self._length, self._patches, {"pixel_values": tile}) for tile in pixels)
        return ImageParts(f"{_START}{_IMAGE * self._length * len(units)}{_END}", units)
