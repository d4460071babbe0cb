"""The ids and pixels of prompts with images are those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from aioinfer.checkpoint.files import Directory
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import shown
from aioinfer.images.source import ImageSource
from tests.images.checkpoints import picture, smolvlm

SIZES = [(96, 96), (40, 80), (32, 32), (200, 17), (1, 1), (33, 31)]


def source(width: int, height: int, seed: int = 0) -> ImageSource:
    return ImageSource(picture(width, height, seed).tobytes(), (width, height))


def processor_of(path: Path) -> ImageProcessor:
    tokens = AutoTokenizer.from_pretrained(path).get_added_vocab()
    found = ImageProcessor.of(Directory(path), tokens)
    assert found is not None
    return found


@pytest.mark.parametrize("family", ["SmolVLM", "Idefics3"])
@pytest.mark.parametrize("split", [True, False])
def test_smolvlm_has_the_ids_and_pixels_of_transformers(tmp_path: Path, family: str, split: bool) -> None:
    smolvlm(tmp_path, family=family, split=split, within=split)
    kind = {"SmolVLM": SmolVLMImageProcessorPil, "Idefics3": Idefics3ImageProcessorPil}[family]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # The other class needs packages for videos; the text of its images is this one's.
    whole = Idefics3Processor(kind.from_pretrained(tmp_path), tokenizer, image_seq_len=16)
    ours = processor_of(tmp_path)
    text = "first<image>".join("abcdefg"[: len(SIZES) + 1])
    pictures = [picture(*size) for size in SIZES]
    expected = whole(text=[text], images=[pictures], return_tensors="np")

    images = [ours.process(source(*size)) for size in SIZES]
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    assert ids == expected["input_ids"][0].tolist()
    found, prompt = ours.fold(ids, images)
    assert shown(found, ours.token_id) == ids
    tiles = np.stack([unit.pixels["pixel_values"] for unit in prompt.units])
    assert np.array_equal(tiles, expected["pixel_values"][0])
    assert all(
        min(found[unit.start : unit.stop]) < 0 > max(found[unit.start : unit.stop]) for unit in prompt.units
    )
    assert sum(unit.length for unit in prompt.units) == ids.count(ours.token_id)
