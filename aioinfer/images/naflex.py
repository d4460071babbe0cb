"""Pixels for LFM2-VL: an image in its own aspect ratio, or tiles of a large one, as rows of patches.

transformers has only a processor that needs torchvision. What it computes is computed here, with the function
of torch that torchvision calls to resize: where torch resizes bytes as bytes (AVX2, AVX-512, ARM), all bits
are the same; elsewhere torchvision resizes floats, and a pixel may differ by 1 of 255.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError, shown

__all__ = ["NaFlex", "Patches"]

Pixels = npt.NDArray[np.uint8]
#: numbers of Pillow for ways to resize, and torch's names
_MODES = {2: "bilinear", 3: "bicubic"}
_NUMBER = (int, float)
_SWITCHES = ("do_rescale", "do_normalize")


class Patches(NamedTuple):
    """A tile, or a whole image."""

    #: float32 [rows * columns, patch * patch * 3]
    values: npt.NDArray[np.float32]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NaFlex:
    """The settings of an image processor of LFM2-VL. Defaults are transformers'."""

    #: pixels on a side of a patch, and patches on a side of a token
    patch: int = 16
    factor: int = 2
    #: pixels on a side of a tile
    tile: int = 512
    #: tiles of an image that is large
    min_tiles: int = 2
    max_tiles: int = 10
    #: whether the whole image follows its tiles
    thumbnail: bool = True
    #: tokens of an image that is not cut, or of the thumbnail
    min_tokens: int = 64
    max_tokens: int = 256
    #: how many times ``max_tokens`` an image may have that is not large
    tolerance: float = 2.0
    mode: str = "bilinear"
    #: of pixels from 0 to 255
    mean: tuple[float, ...] = (127.5, 127.5, 127.5)
    std: tuple[float, ...] = (127.5, 127.5, 127.5)

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> NaFlex:
        """From what a checkpoint states of its image processor. Raises ConfigError."""
        for name in _SWITCHES:
            if _value(stated, name, bool, True) is not True:
                raise ConfigError(f"model: an image processor with {name} false is not supported")
        split = _value(stated, "do_image_splitting", bool, True)
        resample = _value(stated, "resample", int, 2)
        if resample not in _MODES:
            raise ConfigError(f"model: images resized by the way {resample} (resample) are not supported")
        rescale = _value(stated, "rescale_factor", _NUMBER, 1 / 255)
        if not 0 < rescale < math.inf:
            raise ConfigError(f"model: rescale_factor of the image processor is {rescale}")
        found = cls(
            patch=_value(stated, "encoder_patch_size", int, 16),
            factor=_value(stated, "downsample_factor", int, 2),
            tile=_value(stated, "tile_size", int, 512),
            min_tiles=_value(stated, "min_tiles", int, 2) if split else 1,
            max_tiles=_value(stated, "max_tiles", int, 10) if split else 1,
            thumbnail=_value(stated, "use_thumbnail", bool, True),
            min_tokens=_value(stated, "min_image_tokens", int, 64),
            max_tokens=_value(stated, "max_image_tokens", int, 256),
            tolerance=_value(stated, "max_pixels_tolerance", _NUMBER, 2.0),
            mode=_MODES[resample],
            mean=_levels(stated, "image_mean", rescale),
            std=_levels(stated, "image_std", rescale),
        )
        found._check()
        return found

    def _check(self) -> None:
        counts = (self.patch, self.factor, self.tile, self.min_tiles, self.min_tokens)
        if min(counts) < 1 or self.max_tiles < self.min_tiles or self.max_tokens < self.min_tokens:
            raise ConfigError("model: the sizes of the image processor make no sense")
        if self.tile % self.cell:
            raise ConfigError(
                f"model: tile_size of the image processor is {self.tile}, no multiple of {self.cell}"
            )
        if 0 in self.std:
            raise ConfigError("model: image_std of the image processor has a 0")

    def to_dict(self) -> dict[str, Any]:
        """The settings, which name the processor."""
        return asdict(self)

    @property
    def cell(self) -> int:
        """Pixels on a side of a token."""
        return self.patch * self.factor

    @property
    def most_patches(self) -> int:
        """Of a tile or an image that is not cut."""
        tile = (self.tile // self.patch) ** 2 if self.max_tiles > 1 else 0
        return max(tile, self.max_tokens * self.factor**2)

    def process(self, image: Pixels) -> tuple[list[Patches], int, int]:
        """The tiles of an image [height, width, 3], row by row, and behind them the whole one; and the rows
        and columns of tiles, 1 and 1 for an image that is not cut. ``image`` must be one that may be written.
        Raises ValueError for one too long and narrow."""
        height, width, _ = image.shape
        whole = self._whole(height, width)
        if self.max_tiles == 1 or not self._large(height, width):
            return [self._patches(_resized(image, *whole, self.mode))], 1, 1
        rows, columns = self._grid(height, width)
        large = _resized(image, rows * self.tile, columns * self.tile, self.mode)
        tiles = large.reshape(rows, self.tile, columns, self.tile, 3).swapaxes(1, 2)
        found = [self._patches(tile) for tile in tiles.reshape(-1, self.tile, self.tile, 3)]
        if self.thumbnail and rows * columns > 1:
            found.append(self._patches(_resized(image, *whole, self.mode)))
        return found, rows, columns

    def _large(self, height: int, width: int) -> bool:
        """Whether an image is cut into tiles."""
        sides = (max(self.patch, _nearest(side, self.cell)) for side in (height, width))
        return math.prod(sides) > self.max_tokens * self.cell**2 * self.tolerance

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image that is not cut: whole tokens, within bounds. Raises ValueError. As
        Qwen2-VL resizes (arXiv 2409.12191)."""
        cell, area = self.cell, height * width
        tall, wide = (max(cell, _nearest(side, cell)) for side in (height, width))
        most, least = self.max_tokens * cell**2, self.min_tokens * cell**2
        if tall * wide > most:
            shrink = math.sqrt(area / most)
            tall, wide = (max(cell, math.floor(side / shrink / cell) * cell) for side in (height, width))
        elif tall * wide < least:
            grow = math.sqrt(least / area)
            tall, wide = (math.ceil(side * grow / cell) * cell for side in (height, width))
        if tall * wide > self.most_patches * self.patch**2:
            raise ValueError("it is too long and narrow")
        return tall, wide

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, whose aspect ratio is nearest to the image's; of two as near, that of
        more tiles if the image covers more than a half of them."""
        # Of two that are as near and have as many tiles the order in the set decides, as in transformers; so
        # they are added in the same order.
        shapes = {
            (across, down)
            for most in range(self.min_tiles, self.max_tiles + 1)
            for across in range(1, most + 1)
            for down in range(1, most + 1)
            if self.min_tiles <= across * down <= self.max_tiles
        }
        nearest, best = math.inf, (1, 1)
        for across, down in sorted(shapes, key=math.prod):
            distance = abs(width / height - across / down)
            covers = height * width > 0.5 * self.tile**2 * across * down
            if distance < nearest or (distance == nearest and covers):
                nearest, best = distance, (across, down)
        return best[1], best[0]

    def _patches(self, image: Pixels) -> Patches:
        height, width, _ = image.shape
        rows, columns = height // self.patch, width // self.patch
        values = image.astype(np.float32)
        values -= np.array(self.mean, np.float32)
        values /= np.array(self.std, np.float32)
        cut = values.reshape(rows, self.patch, columns, self.patch, 3).swapaxes(1, 2)
        return Patches(cut.reshape(rows * columns, -1), rows, columns)


def _nearest(number: int, factor: int) -> int:
    """The nearest multiple; of two the even one, as Python rounds."""
    return round(number / factor) * factor


def _resized(image: Pixels, height: int, width: int, mode: str) -> Pixels:
    import torch

    if image.shape[:2] == (height, width):
        return image
    values = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    found = torch.nn.functional.interpolate(
        values, (height, width), mode=mode, align_corners=False, antialias=True
    )
    return found[0].permute(1, 2, 0).numpy()


def _value(stated: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    """What is stated of a name, or the default. Raises ConfigError if it is of another type."""
    found = stated.get(name)
    if found is None:
        return default
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise ConfigError(f"model: {name} of the image processor is {shown(found)}")
    return found


def _levels(stated: Mapping[str, Any], name: str, rescale: float) -> tuple[float, ...]:
    """Three numbers for pixels from 0 to 1, as such for pixels from 0 to 255."""
    found = _value(stated, name, (list, tuple), (0.5, 0.5, 0.5))
    if len(found) != 3 or not all(isinstance(each, _NUMBER) and math.isfinite(each) for each in found):
        raise ConfigError(f"model: {name} of the image processor is {shown(found)}")
    # In float32, as transformers does it.
    levels = np.array(found, np.float32) * np.float32(1 / rescale)
    return tuple(map(float, levels))
