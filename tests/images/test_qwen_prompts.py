"""Prompts with images of Qwen3-VL and Qwen3.5 have the ids, pixels and positions of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from aioinfer.checkpoint.files import Directory
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import shown
from aioinfer.images.source import ImageSource
from tests.images.checkpoints import picture
from tests.images.qwen_models import FAMILIES, IMAGE, qwen, whole_inputs

#: wide, high, square, larger and smaller than images may be, and hardly an image
SIZES = [(40, 20), (17, 64), (32, 32), (200, 100), (1, 1), (5, 3), (190, 1)]


def source(image: Image.Image) -> ImageSource:
    return ImageSource(image.tobytes(), image.size)


def processor_of(path: Path) -> ImageProcessor:
    tokens = AutoTokenizer.from_pretrained(path).get_added_vocab()
    found = ImageProcessor.of(Directory(path), tokens)
    assert found is not None
    return found


def edit(path: Path, **fields: object) -> None:
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    ["", "only", f"{IMAGE}", f"{IMAGE}{IMAGE}", f"one{IMAGE}two{IMAGE}", IMAGE.join("abcdefgh")],
    ids=lambda text: f"{text.count(IMAGE)} images of {len(text)}",
)
def test_ids_pixels_and_positions_are_those_of_transformers(tmp_path: Path, family: str, text: str) -> None:
    oracle, pictures = qwen(tmp_path, family), [picture(*size) for size in SIZES[: text.count(IMAGE)]]
    ours, tokenizer = processor_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    images = [ours.process(source(each)) for each in pictures]
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    found, prompt = ours.fold(ids, images)
    if not pictures:
        assert (found, prompt.units, prompt.rotary, prompt.delta) == (ids, (), None, 0)
        return
    expected = whole_inputs(tmp_path, text, pictures)
    assert ids == expected["input_ids"][0].tolist()
    assert shown(found, ours.token_id) == ids
    pixels = np.concatenate([unit.pixels["pixel_values"] for unit in prompt.units])
    assert np.array_equal(pixels, expected["pixel_values"].numpy())
    grids = [[1, *unit.pixels["grid"].tolist()] for unit in prompt.units]
    assert grids == expected["image_grid_thw"].tolist()
    assert [unit.patches for unit in prompt.units] == [height * width for _, height, width in grids]
    del expected["pixel_values"]
    positions, delta = oracle.model.get_rope_index(**expected)
    assert prompt.rotary is not None
    assert torch.equal(torch.from_numpy(prompt.rotary).long(), positions[:, 0])
    assert prompt.delta == int(delta)


def test_a_position_is_never_above_its_number(tmp_path: Path) -> None:
    """So that tables of rotary factors have it."""
    qwen(tmp_path)
    ours, tokenizer = processor_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    images = [ours.process(source(picture(*size))) for size in SIZES]
    text = ours.expand(IMAGE * len(SIZES), images)
    _, prompt = ours.fold(tokenizer.encode(text, add_special_tokens=False), images)
    assert prompt.rotary is not None
    assert (prompt.rotary <= np.arange(prompt.rotary.shape[1])).all()
    assert prompt.delta <= 0


def test_an_image_that_is_too_thin_is_refused(tmp_path: Path) -> None:
    qwen(tmp_path)
    with pytest.raises(InvalidRequest, match="201 x 1 pixels: absolute aspect ratio"):
        processor_of(tmp_path).process(source(picture(201, 1)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 8}, "patch_size of the config is 4, but its images are made for 8"),
        ({"merge_size": 1}, "spatial_merge_size of the config is 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size of the config is 2"),
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor' processes"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    qwen(tmp_path)
    edit(tmp_path, **fields)
    with pytest.raises(ConfigError, match=message):
        processor_of(tmp_path)


def test_another_image_token_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    qwen(tmp_path, image_token_id=7)
    with pytest.raises(ConfigError, match="image_token_id of the config is 7"):
        processor_of(tmp_path)


def test_the_token_of_videos_is_reserved(tmp_path: Path) -> None:
    qwen(tmp_path)
    assert "<|video_pad|>" in processor_of(tmp_path).reserved
