"""SmolVLM and Idefics3: an image is cut into tiles, and all of it is a further tile behind them.

The text of an image of two rows and one column, where a tile has three positions::

    <fake_token_around_image><row_1_col_1><image><image><image>
    <fake_token_around_image><row_2_col_1><image><image><image>

    <fake_token_around_image><global-img><image><image><image><fake_token_around_image>

Source: ``SmolVLMProcessor`` and ``Idefics3Processor`` of transformers, which have the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.images.formats.base import FormatFacts, ImageParts, UnitPixels, pil_processor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Smolvlm"]

_MODULES = {"SmolVLMImageProcessor": "smolvlm", "Idefics3ImageProcessor": "idefics3"}
_IMAGE, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"


class Smolvlm:
    """The format of both families."""

    placeholder = _IMAGE
    reserved = (_AROUND, _WHOLE)

    def __init__(self, facts: FormatFacts) -> None:
        config = facts.config
        self.token_id = facts.token(_IMAGE)
        self.processor = pil_processor(facts, _MODULES, return_row_col_info=True)
        side = self.processor.max_image_size["longest_edge"] // config.vision_config.patch_size
        #: positions that the encoder computes of a tile, and that the prompt has of it
        self._patches = side * side
        self._length = int(facts.processor.get("image_seq_len", 169))
        if self._length * config.scale_factor**2 != self._patches:
            raise ConfigError(
                f"model: image_seq_len is {self._length}, but a tile has {self._patches} patches, of which "
                f"{config.scale_factor**2} make a position"
            )

    def parts(self, image: Image) -> ImageParts:
        found = self.processor([[image]], return_tensors="np")
        pixels = np.asarray(found["pixel_values"][0], np.float32)
        rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
        units = tuple(UnitPixels(self._length, self._patches, {"pixel_values": tile}) for tile in pixels)
        return ImageParts(self._text(rows, columns), units)

    def _text(self, rows: int, columns: int) -> str:
        """The text of an image; no rows: it is its own only tile."""
        tile = _IMAGE * self._length
        lines = [
            "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        between = "\n" if rows else ""
        return f"{''.join(lines)}{between}{_AROUND}{_WHOLE}{tile}{_AROUND}"
