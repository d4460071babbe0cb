"""Prompts with images of InternVL have the ids and pixels of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from aioinfer.checkpoint.files import Directory
from aioinfer.errors import ConfigError
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import shown
from aioinfer.images.source import ImageSource
from tests.images.checkpoints import picture
from tests.images.internvl_models import IMAGE, internvl, whole_inputs

#: of one tile to four, and hardly images
SIZES = [(40, 20), (17, 64), (16, 16), (200, 100), (1, 1), (5, 3), (190, 1)]


def processor_of(path: Path) -> ImageProcessor:
    tokens = AutoTokenizer.from_pretrained(path).get_added_vocab()
    found = ImageProcessor.of(Directory(path), tokens)
    assert found is not None
    return found


@pytest.mark.parametrize("count", [1, 2, 7])
def test_ids_and_pixels_are_those_of_transformers(tmp_path: Path, count: int) -> None:
    internvl(tmp_path)
    ours, tokenizer = processor_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    pictures = [picture(*size) for size in SIZES[:count]]
    text = IMAGE.join("abcdefgh"[: count + 1])
    expected = whole_inputs(tmp_path, text, pictures)
    images = [ours.process(ImageSource(each.tobytes(), each.size)) for each in pictures]
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    assert ids == expected["input_ids"][0].tolist()
    found, prompt = ours.fold(ids, images)
    assert shown(found, ours.token_id) == ids
    tiles = np.stack([unit.pixels["pixel_values"] for unit in prompt.units])
    assert np.array_equal(tiles, expected["pixel_values"].numpy())
    assert len(tiles) > count
    assert sum(unit.length for unit in prompt.units) == ids.count(ours.token_id)
    assert {unit.patches for unit in prompt.units} == {17}


def edit(path: Path, file: str, **fields: object) -> None:
    stated = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**stated, **fields}))


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("preprocessor_config.json", {"size": {"height": 8, "width": 8}}, r"tiles have \[8, 8\] pixels"),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "'CLIPImage.*processes"),
        ("processor_config.json", {"image_seq_length": 16}, "image_seq_length is 16, but a tile has 16"),
        ("config.json", {"image_token_id": 7}, "image_token_id of the config is 7"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    internvl(tmp_path)
    edit(tmp_path, file, **fields)
    with pytest.raises(ConfigError, match=message):
        processor_of(tmp_path)


def test_an_image_of_one_tile_is_not_cut(tmp_path: Path) -> None:
    internvl(tmp_path)
    image = Image.new("RGB", (16, 16))
    found = processor_of(tmp_path).process(ImageSource(image.tobytes(), image.size))
    assert len(found.parts.units) == 1
