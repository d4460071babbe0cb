"""Qwen3-VL and Qwen3.5: an image has as many positions as its size gives, and each of them three numbers.

A position is a square of patches, row by row. Its image token is repeated in place of the one that the chat
template writes, between the tokens that begin and end an image. Videos have texts and positions of their own
and are refused.

Source: ``Qwen3VLProcessor`` of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.images.formats.base import FormatFacts, ImageParts, UnitPixels, pil_processor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Qwen3Vl"]

_MODULES = {"Qwen2VLImageProcessor": "qwen2_vl"}
_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"


class Qwen3Vl:
    """The format of both families, dense or with experts."""

    placeholder = _IMAGE
    reserved = (_VIDEO,)

    def __init__(self, facts: FormatFacts) -> None:
        config, vision = facts.config, facts.config.vision_config
        self.token_id = facts.token(_IMAGE)
        self.processor = pil_processor(facts, _MODULES)
        named = {
            "image_token_id": (config.image_token_id, self.token_id),
            "patch_size": (vision.patch_size, self.processor.patch_size),
            "temporal_patch_size": (vision.temporal_patch_size, self.processor.temporal_patch_size),
            "spatial_merge_size": (vision.spatial_merge_size, self.processor.merge_size),
        }
        for name, (stated, found) in named.items():
            if stated != found:
                raise ConfigError(
                    f"model: {name} of the config is {stated}, but its images are made for {found}"
                )

    def parts(self, image: Image) -> ImageParts:
        found = self.processor([image], return_tensors="np")
        _, height, width = found["image_grid_thw"][0].tolist()
        side = self.processor.merge_size
        rows, columns = height // side, width // side
        pixels = {
            "pixel_values": np.asarray(found["pixel_values"], np.float32),
            "grid": np.array([height, width]),
        }
        unit = UnitPixels(rows * columns, height * width, pixels, (rows, columns))
        return ImageParts(_IMAGE * unit.length, (unit,))
