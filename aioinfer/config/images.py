"""ImageSettings: the settings of prompts with images, a part of :class:`~aioinfer.EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aioinfer.config.options import AT_LEAST_ONE, NOT_NEGATIVE, Bounds, Settings, option

__all__ = ["ImageSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings(Settings):
    """Settings of images in prompts."""

    images: bool = option(
        True, "images", "load the image encoder of a model that has one; off: it reads text alone"
    )
    mmproj: str | None = option(
        None,
        "images",
        "of a model in a GGUF file: the file of its image encoder; by default the one beside it that is "
        "called mmproj",
    )
    max_images: int = option(32, "images", "images of one prompt", NOT_NEGATIVE)
    max_image_bytes: int = option(20 << 20, "images", "bytes of the file of one image", AT_LEAST_ONE)
    max_image_pixels: int = option(
        64 << 20, "images", "pixels of one image, before it is resized", AT_LEAST_ONE
    )
    #: An image or a tile with more is computed in slices of the encoder's layers.
    max_encoder_tokens: int = option(
        512, "images", "positions that the image encoder computes between two steps of text", AT_LEAST_ONE
    )
    encoder_cache_gib: float = option(
        0.25, "images", "GiB of encoded images that are kept for other prompts", Bounds(0, 1 << 10)
    )

    @property
    def mmproj_file(self) -> Path | bool:
        """The file of the image encoder of a model in a GGUF file; True: the one beside it, False: none."""
        if not self.images:
            return False
        return True if self.mmproj is None else Path(self.mmproj).expanduser()
