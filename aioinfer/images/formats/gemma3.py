"""Gemma 3: an image is a square of a fixed number of positions between two tokens and two blank lines.

Pan and scan ("Gemma 3 Technical Report", arXiv 2503.19786, section 2.1), where the image processor's settings
ask for it, puts crops of a long image behind all of it. transformers' own processor computes crops only for
callers who ask, whatever the settings say.

Source: ``Gemma3Processor`` of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.images.formats.base import FormatFacts, ImageParts, UnitPixels, pil_processor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Gemma3"]

#: what transformers' processor has where the settings have nothing
_CROPS = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


class Gemma3:
    """The format."""

    def __init__(self, facts: FormatFacts) -> None:
        config, vision = facts.config, facts.config.vision_config
        begin, image, end = (
            facts.text(token)
            for token in (config.boi_token_index, config.image_token_index, config.eoi_token_index)
        )
        self.placeholder, self.token_id = begin, config.image_token_index
        self.reserved = (image, end)
        stated = {name: facts.settings.get(name) for name in _CROPS}
        crops = {name: default if stated[name] is None else stated[name] for name, default in _CROPS.items()}
        self.processor = pil_processor(
            facts, {"Gemma3ImageProcessor": "gemma3"}, do_convert_rgb=True, **crops
        )
        size, side = self.processor.size, vision.image_size
        if (size["height"], size["width"]) != (side, side):
            raise ConfigError(
                f"model: images are resized to {size['width']} x {size['height']}, "
                f"its encoder computes {side} x {side}"
            )
        self._length = int(facts.processor.get("image_seq_length", 256))
        if self._length != config.mm_tokens_per_image:
            raise ConfigError(
                f"model: image_seq_length is {self._length}, mm_tokens_per_image {config.mm_tokens_per_image}"
            )
        self._patches = (side // vision.patch_size) ** 2
        self._whole = f"\n\n{begin}{image * self._length}{end}\n\n"

    def parts(self, image: Image) -> ImageParts:
        found = self.processor([[image]], return_tensors="np")
        pixels = np.asarray(found["pixel_values"], np.float32)
        units = tuple(UnitPixels(self._length, self._patches, {"pixel_values": each}) for each in pixels)
        return ImageParts(self._text(len(units) - 1), units)

    def _text(self, crops: int) -> str:
        if not crops:
            return self._whole
        introduced = (
            f"Here is the original image {self._whole} and here are some crops to help you see better "
        )
        return introduced + " ".join([self._whole] * crops)
