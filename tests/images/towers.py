"""Units of the families of image encoders, as the encoder here gets them and as transformers does.

A family adds its models to :mod:`tests.model.multimodal_models`, and a line to ``TOWERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["TOWERS", "TowerCase", "features", "oracle_features"]

#: makes of a size and random numbers the arrays of a unit, and the arguments of get_image_features
Make = Callable[[tuple[int, int], np.random.Generator], tuple[dict[str, Any], dict[str, Any]]]


class TowerCase(NamedTuple):
    """The units of one model."""

    make: Make
    #: heights and widths of units, in what ``make`` counts
    sizes: tuple[tuple[int, int], ...]


def listed_tile(size: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tile of SmolVLM and Idefics3, to which transformers gives lists of images."""
    pixels = rng.standard_normal((3, *size), dtype=np.float32)
    return {"pixel_values": pixels}, {"pixel_values": torch.from_numpy(pixels)[None, None]}


def tile(size: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tile by itself."""
    pixels = rng.standard_normal((3, *size), dtype=np.float32)
    return {"pixel_values": pixels}, {"pixel_values": torch.from_numpy(pixels)[None]}


def naflex(grid: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """An image or a tile of LFM2-VL; with patches for transformers that are none."""
    rows, columns = grid
    pixels = rng.standard_normal((rows * columns, 48), dtype=np.float32)
    padded = np.pad(pixels, ((0, 8), (0, 0)))
    return {"pixel_values": pixels, "spatial_shape": np.array(grid)}, {
        "pixel_values": torch.from_numpy(padded)[None],
        "spatial_shapes": torch.tensor([grid]),
        "pixel_attention_mask": (torch.arange(len(padded)) < len(pixels)).int()[None],
    }


def patches(size: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """An image of Gemma 4 in so many rows and columns of squares of three by three patches, among padding."""
    rows, columns = (3 * count for count in size)
    values = rng.random((81, 48), dtype=np.float32)
    values[rows * columns :] = 0
    places = np.full((81, 2), -1)
    grid = np.meshgrid(np.arange(columns), np.arange(rows))
    places[: rows * columns] = np.stack(grid, -1).reshape(-1, 2)
    given = {"pixel_values": torch.from_numpy(values), "image_position_ids": torch.from_numpy(places)}
    arrays = {"patches": values[: rows * columns], "grid": np.array([rows, columns])}
    return arrays, {name: tensor[None] for name, tensor in given.items()}


def qwen(grid: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """An image of Qwen3-VL or Qwen3.5."""
    rows, columns = grid
    pixels = rng.standard_normal((rows * columns, 48), dtype=np.float32)
    return {"pixel_values": pixels, "grid": np.array(grid)}, {
        "pixel_values": torch.from_numpy(pixels),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


_QWEN = TowerCase(qwen, ((4, 4), (2, 14), (10, 6), (2, 2)))
#: by the names of models
TOWERS = {
    "smolvlm": TowerCase(listed_tile, ((16, 16), (24, 24), (40, 40))),
    "idefics3": TowerCase(listed_tile, ((26, 26), (38, 38))),
    "internvl": TowerCase(tile, ((16, 16), (16, 16))),
    "gemma3": TowerCase(tile, ((16, 16),)),
    "gemma4-deaf": TowerCase(patches, ((1, 1), (3, 3), (2, 4), (5, 1))),
    "internvl-rms": TowerCase(tile, ((24, 24),)),
    "lfm2-vl": TowerCase(naflex, ((4, 4), (2, 14), (10, 6))),
    "qwen3-vl": _QWEN,
    "qwen3-vl-moe": _QWEN,
    "qwen3.5-vl": _QWEN,
    "qwen3.5-vl-moe": _QWEN,
}


def oracle_features(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """[1 + deep, length, hidden] by transformers' ``model``."""
    with torch.no_grad():
        found = model.model.get_image_features(**arguments, return_dict=True)
    pooled = found.pooler_output
    main = torch.cat([*pooled]) if isinstance(pooled, (list, tuple)) else pooled.flatten(0, -2)
    # Older releases do not split them by image.
    deep = [torch.cat([*each]).view_as(main) for each in getattr(found, "deepstack_features", None) or ()]
    return torch.stack([main, *deep])


def features(encoder: Any, pixels: dict[str, Any]) -> torch.Tensor:
    """The features of a unit, by all layers at once."""
    with torch.no_grad():
        state = encoder.begin(pixels)
        for index in range(encoder.depth):
            state = encoder.layer(index, state)
        found: torch.Tensor = encoder.end(state)
    return found
