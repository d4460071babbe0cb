"""Pixels of LFM2-VL are those of transformers' processor."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aioinfer.errors import ConfigError
from aioinfer.images.naflex import NaFlex, Patches
from tests.images.lfm2_processor import processor_class, theirs

__all__ = ["processor_class"]

SMALL = {
    "tile_size": 64, "encoder_patch_size": 8, "min_image_tokens": 4, "max_image_tokens": 16,
    "image_mean": [0.48, 0.45, 0.41], "image_std": [0.27, 0.26, 0.28],
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_thumbnail": False, "max_tiles": 4},
    {"do_image_splitting": False, "resample": 3},
    SMALL,
    {**SMALL, "max_tiles": 6, "max_pixels_tolerance": 1.2, "rescale_factor": 0.01},
    {"tile_size": 32, "encoder_patch_size": 4, "min_image_tokens": 2, "max_image_tokens": 16},
]
#: height and width: smaller than a token, as large as a tile and one more, long both ways, and a ratio
#: that is as near to those of two grids
SIZES = [
    (1, 1), (40, 33), (300, 200), (512, 512), (512, 513), (1024, 1024), (1500, 700), (900, 720), (200, 250),
    (60, 700), (700, 60),
]  # fmt: skip


def check(found: tuple[list[Patches], int, int], expected: Any) -> None:
    tiles, rows, columns = found
    assert (rows, columns) == (expected["image_rows"][0], expected["image_cols"][0])
    assert [[tile.rows, tile.columns] for tile in tiles] == expected["spatial_shapes"].tolist()
    for tile, values in zip(tiles, expected["pixel_values"].numpy(), strict=True):
        np.testing.assert_array_equal(tile.values, values[: tile.rows * tile.columns])


@pytest.mark.parametrize("settings", SETTINGS)
def test_pixels_are_those_of_transformers(processor_class: Any, settings: dict[str, Any]) -> None:
    chance, bits = random.Random(1), np.random.default_rng(1)
    sizes = SIZES + [tuple(int(2 ** chance.uniform(3, 10)) for _ in "hw") for _ in range(4)]
    cut = 0
    for height, width in sizes:
        image = bits.integers(0, 256, (height, width, 3), dtype=np.uint8)
        try:
            found = NaFlex.of(settings).process(image)
        except ValueError as error:
            assert "long and narrow" in str(error)
            assert max(height / width, width / height) > 10
            continue
        check(found, theirs(processor_class, image, settings))
        cut += found[1] * found[2] > 1
    assert cut or not settings.get("do_image_splitting", True)


def test_an_image_of_more_patches_than_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="too long and narrow"):
        NaFlex().process(np.zeros((1, 20_000, 3), np.uint8))


@pytest.mark.parametrize(
    "stated",
    [
        {"resample": 1}, {"do_normalize": False}, {"do_rescale": "yes"}, {"tile_size": 500}, {"tile_size": 0},
        {"encoder_patch_size": True}, {"downsample_factor": -2}, {"min_tiles": 11}, {"min_image_tokens": 257},
        {"image_mean": [0.5]}, {"image_std": [0.5, 0, 0.5]}, {"image_std": [0.5, float("nan"), 0.5]},
        {"image_mean": "0.5"}, {"rescale_factor": 0}, {"max_pixels_tolerance": None, "use_thumbnail": 1},
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_one_error(stated: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="image"):
        NaFlex.of(stated)
