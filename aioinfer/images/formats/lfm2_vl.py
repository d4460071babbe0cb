"""LFM2-VL: an image is one unit of its own size; a large one is cut into tiles, with all of it behind them.

The text of an image of one row and two columns, where a tile has three positions, and all of it two::

    <|image_start|><|img_row_1_col_1|><image><image><image><|img_row_1_col_2|><image><image><image>
    <|img_thumbnail|><image><image><|image_end|>

Source: ``Lfm2VlProcessor`` of transformers. Its image processor needs torchvision; see
:mod:`aioinfer.images.naflex`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError, shown
from aioinfer.images.formats.base import FormatFacts, ImageParts, UnitPixels
from aioinfer.images.naflex import NaFlex, Patches

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Lfm2Vl"]

_IMAGE, _START, _END, _WHOLE = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
_NAMES = (None, "Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")


class Lfm2Vl:
    """The format of LFM2-VL."""

    placeholder = _IMAGE
    reserved = (_START, _END, _WHOLE)

    def __init__(self, facts: FormatFacts) -> None:
        named = facts.settings.get("image_processor_type")
        if named not in _NAMES:
            raise ConfigError(f"model: images that {shown(named)} processes are not supported")
        self.token_id = facts.token(_IMAGE)
        self.processor = NaFlex.of(facts.settings)
        stated = facts.config.vision_config.patch_size, facts.config.downsample_factor
        if stated != (self.processor.patch, self.processor.factor):
            raise ConfigError(f"model: its image processor has other patches than its encoder, {stated}")
        self._special = facts.processor.get("use_image_special_tokens", True)

    def parts(self, image: Image) -> ImageParts:
        tiles, rows, columns = self.processor.process(np.array(image))
        units = tuple(self._unit(tile) for tile in tiles)
        texts = [_IMAGE * unit.length for unit in units]
        if not self._special:
            return ImageParts("".join(texts), units)
        if len(units) > 1:
            places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
            marks = [f"<|img_row_{row}_col_{column}|>" for row, column in places]
            texts = [mark + text for mark, text in zip([*marks, _WHOLE], texts, strict=False)]
        return ImageParts(f"{_START}{''.join(texts)}{_END}", units)

    def _unit(self, tile: Patches) -> UnitPixels:
        shape = np.array([tile.rows, tile.columns], np.int64)
        pixels: dict[str, npt.NDArray[np.generic]] = {"pixel_values": tile.values, "spatial_shape": shape}
        return UnitPixels(len(tile.values) // self.processor.factor**2, len(tile.values), pixels)
