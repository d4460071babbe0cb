"""Gemma 4: an image keeps its shape and has a position for each square of patches, between two tokens.

Source: ``Gemma4Processor`` of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError
from aioinfer.images.formats.base import FormatFacts, ImageParts, UnitPixels, pil_processor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MOST_POSITIONS", "Gemma4"]

#: of an image, for a config that does not state ``vision_soft_tokens_per_image``
MOST_POSITIONS = 280


class Gemma4:
    """The format."""

    def __init__(self, facts: FormatFacts) -> None:
        config, vision = facts.config, facts.config.vision_config
        self._begin, self.placeholder, self._end = (
            facts.text(token) for token in (config.boi_token_id, config.image_token_id, config.eoi_token_id)
        )
        self.token_id = config.image_token_id
        self.reserved = (self._begin, self._end)
        self.processor = pil_processor(facts, {"Gemma4ImageProcessor": "gemma4"})
        for name in ("patch_size", "pooling_kernel_size"):
            own, wanted = getattr(self.processor, name), getattr(vision, name)
            if own != wanted:
                raise ConfigError(f"model: {name} of its image processor is {own}, of its encoder {wanted}")
        most = getattr(config, "vision_soft_tokens_per_image", MOST_POSITIONS)
        if self.processor.max_soft_tokens > most:
            raise ConfigError(
                f"model: max_soft_tokens of its image processor is {self.processor.max_soft_tokens}, above "
                f"vision_soft_tokens_per_image of its config, {most}"
            )
        self._square = vision.pooling_kernel_size

    def parts(self, image: Image) -> ImageParts:
        found = self.processor([[image]], return_tensors="np")
        length = int(found["num_soft_tokens_per_image"][0])
        # What fills an array up to the largest image is left out.
        patches = length * self._square**2
        pixels = np.asarray(found["pixel_values"][0][:patches], np.float32)
        columns, rows = (int(last) + 1 for last in found["image_position_ids"][0][:patches].max(0))
        if rows % self._square or columns % self._square or rows * columns != patches:
            raise ValueError(f"{columns} x {rows} patches are not squares of {self._square}")
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "patches": pixels,
            "grid": np.array([rows, columns], np.int64),
        }
        text = f"{self._begin}{self.placeholder * length}{self._end}"
        return ImageParts(text, (UnitPixels(length, patches, arrays),))
