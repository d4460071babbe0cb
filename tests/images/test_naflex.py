"""Pixels of LFM2-VL beside those of transformers' processor.

That processor needs torchvision. Of it, it calls two functions; they stand here as what torchvision makes of
them for bytes on a CPU, so that all else is transformers' own.
"""

from __future__ import annotations

import inspect
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.images.naflex import NaFlex, Patches

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


def functional() -> Any:
    """What transformers calls of torchvision."""

    def resize(image: torch.Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> Any:
        if image.shape[-2:] == size:
            return image
        return torch.nn.functional.interpolate(
            image, size, mode=interpolation, align_corners=False, antialias=antialias
        )

    def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool) -> torch.Tensor:
        return image.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    modes = SimpleNamespace(LANCZOS="lanczos", BILINEAR="bilinear", BICUBIC="bicubic")
    return SimpleNamespace(resize=resize, normalize=normalize, InterpolationMode=modes)


@pytest.fixture
def processor_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of transformers, over these functions."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules = [ModuleType(name) for name in names]
    modules[-1].functional = functional()  # type: ignore[attr-defined]
    module = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    monkeypatch.delitem(sys.modules, module, raising=False)
    # Before there is something by the name: transformers looks whether it is installed, once.
    from transformers import image_processing_backends

    with monkeypatch.context() as patched:
        for name, stub in zip(names, modules, strict=True):
            patched.setitem(sys.modules, name, stub)
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(image_processing_backends, "tvF", functional(), raising=False)
    return Lfm2VlImageProcessor


def theirs(kind: Any, image: npt.NDArray[np.uint8], settings: dict[str, Any]) -> Any:
    """What transformers makes of an image. Its constructor asks for torchvision, so there is none."""
    processor = object.__new__(kind)
    names = inspect.signature(kind._preprocess).parameters
    fields = {name: getattr(kind, name) for name in names if hasattr(kind, name)}
    fields |= settings
    fields["image_mean"], fields["image_std"] = tuple(fields["image_mean"]), tuple(fields["image_std"])
    fields["resample"] = {2: "bilinear", 3: "bicubic"}[int(fields["resample"])]
    fields |= {
        "do_resize": True,
        "return_row_col_info": True,
        "return_tensors": "pt",
        "disable_grouping": None,
    }
    pixels = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return processor._preprocess([pixels], **fields)


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
