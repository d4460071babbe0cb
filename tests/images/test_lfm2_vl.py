"""The ids, pixels and features of LFM2-VL's images are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from aioinfer.checkpoint.files import Directory
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import shown
from aioinfer.images.source import ImageSource
from tests.images.checkpoints import lfm2_vl, picture
from tests.images.lfm2_processor import processor_class, theirs
from tests.images.towers import features, oracle_features
from tests.model.harness import load

__all__ = ["processor_class"]

SIZES = [(64, 64), (20, 30), (200, 90), (32, 33), (1, 1), (300, 40)]


def opened(path: Path) -> ImageProcessor:
    found = ImageProcessor.of(Directory(path), AutoTokenizer.from_pretrained(path).get_added_vocab())
    assert found is not None
    return found


def processed_by_transformers(path: Path, kind: Any) -> tuple[list[str], list[Any]]:
    """What stands for each image in a text, and its arrays."""
    stated = json.loads((path / "processor_config.json").read_text())
    settings = stated["image_processor"]
    names = {"encoder_patch_size", "downsample_factor", "tile_size"}
    made = object.__new__(Lfm2VlProcessor)
    made.image_processor = SimpleNamespace(use_thumbnail=True, **{name: settings[name] for name in names})
    made.image_token, made.image_start_token, made.image_end_token, made.image_thumbnail_token = (
        *("<image>", "<|image_start|>", "<|image_end|>"),
        "<|img_thumbnail|>",
    )
    arrays = [theirs(kind, np.array(picture(*size)), settings) for size in SIZES]
    special = stated["use_image_special_tokens"]
    texts = [made.replace_image_token(each, 0, use_image_special_tokens=special) for each in arrays]
    return texts, arrays


@pytest.mark.parametrize("special", [True, False])
def test_ids_pixels_and_features_are_those_of_transformers(
    tmp_path: Path, processor_class: Any, special: bool
) -> None:
    oracle = lfm2_vl(tmp_path, special=special)
    texts, arrays = processed_by_transformers(tmp_path, processor_class)
    ours, tokenizer = opened(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    images = [ours.process(ImageSource(picture(*size).tobytes(), size)) for size in SIZES]
    text = ours.expand("a<image>b<image><image>c<image>d<image>e<image>", images)
    pieces = ["a", "b", "", "c", "d", "e"]
    assert text == "".join(piece + image for piece, image in zip(pieces, texts, strict=True))
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, prompt = ours.fold(ids, images)
    assert shown(found, ours.token_id) == ids

    encoder = load(tmp_path, kernels="sdpa").encoder
    tiles = [(values, shape, mask) for each in arrays for values, shape, mask in zip(
        each["pixel_values"], each["spatial_shapes"], each["pixel_attention_mask"], strict=True
    )]  # fmt: skip
    for unit, (values, shape, mask) in zip(prompt.units, tiles, strict=True):
        patches = torch.from_numpy(unit.pixels["pixel_values"])
        assert torch.equal(patches, values[: int(mask.sum())])
        assert unit.pixels["spatial_shape"].tolist() == shape.tolist()
        assert unit.patches == len(patches)
        expected = oracle_features(
            oracle,
            {"pixel_values": values[None], "spatial_shapes": shape[None], "pixel_attention_mask": mask[None]},
        )
        vectors = features(encoder, dict(unit.pixels))
        assert vectors.shape == expected.shape == (1, unit.length, 48)
        assert (vectors - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_an_image_that_is_too_long_is_named(tmp_path: Path) -> None:
    lfm2_vl(tmp_path)
    with pytest.raises(InvalidRequest, match=r"images: the model takes no image of 2000 x 1 .*narrow"):
        opened(tmp_path).process(ImageSource(bytes(6000), (2000, 1)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder_patch_size": 8}, "other patches than its encoder"),
        ({"image_processor_type": "Siglip2ImageProcessor"}, "Siglip2ImageProcessor"),
        ({"resample": 0}, "resample"),
    ],
)
def test_a_processor_that_does_not_fit_is_one_error(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    lfm2_vl(tmp_path)
    file = tmp_path / "processor_config.json"
    stated = json.loads(file.read_text())
    stated["image_processor"] |= change
    file.write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path)
