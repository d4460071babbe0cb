"""The ids and pixels of Gemma's prompts with images are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from aioinfer.errors import ConfigError
from aioinfer.images.prompt import PromptImages, shown
from tests.images.checkpoints import picture
from tests.images.gemma import gemma3, gemma4
from tests.images.test_prompts import SIZES, processor_of, source
from tests.model.multimodal_models import edit_config


def prompt(path: Path, placeholder: str) -> tuple[str, list[int], PromptImages]:
    """A text with an image of every size, its ids, and where its images are."""
    ours, tokenizer = processor_of(path), AutoTokenizer.from_pretrained(path)
    text = f" first\n{placeholder}\n".join("abcdefghij"[: len(SIZES) + 1])
    images = [ours.process(source(*size)) for size in SIZES]
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    found, folded = ours.fold(ids, images)
    assert shown(found, ours.token_id) == ids
    assert all(max(found[unit.start : unit.stop]) < 0 for unit in folded.units)
    assert sum(unit.length for unit in folded.units) == ids.count(ours.token_id)
    return text, ids, folded


@pytest.mark.parametrize("crops", [None, True])
def test_gemma3_has_the_ids_and_pixels_of_transformers(tmp_path: Path, crops: bool | None) -> None:
    gemma3(tmp_path, crops=crops, within=crops is None)
    text, ids, images = prompt(tmp_path, "<start_of_image>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    whole = Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(tmp_path), tokenizer, image_seq_length=16)
    pictures = [picture(*size) for size in SIZES]
    asked: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20} if crops else {}
    expected = whole(text=[text], images=[pictures], return_tensors="np", **asked)
    assert ids == expected["input_ids"][0].tolist()
    pixels = np.stack([unit.pixels["pixel_values"] for unit in images.units])
    assert np.array_equal(pixels, expected["pixel_values"])
    assert (len(pixels) > len(SIZES)) == bool(crops)


def test_gemma4_has_the_ids_and_pixels_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processing = pytest.importorskip(
        "transformers.models.gemma4.processing_gemma4",
        reason="in older releases it needs torchvision",
        exc_type=ImportError,
    )
    gemma4(tmp_path)
    text, ids, images = prompt(tmp_path, "<|image|>")
    tokenizer, kind = AutoTokenizer.from_pretrained(tmp_path), Gemma4ImageProcessorPil
    # It has no processors of sounds and videos, which need further packages.
    monkeypatch.setattr(processing.Gemma4Processor, "check_argument_for_proper_class", lambda *_: None)
    whole = processing.Gemma4Processor(None, kind.from_pretrained(tmp_path), tokenizer, None)
    pictures = [picture(*size) for size in SIZES]
    expected = whole(text=[text], images=[pictures], return_tensors="np")
    assert ids == expected["input_ids"][0].tolist()
    for at, unit in enumerate(images.units):
        rows, columns = unit.pixels["grid"]
        assert unit.patches == rows * columns == 4 * unit.length
        assert np.array_equal(unit.pixels["patches"], expected["pixel_values"][at][: unit.patches])
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
        assert np.array_equal(expected["image_position_ids"][at][: unit.patches], places)
        assert (expected["image_position_ids"][at][unit.patches :] == -1).all()


def test_processors_that_do_not_fit_the_encoder_are_refused(tmp_path: Path) -> None:
    gemma3(tmp_path / "3")
    gemma4(tmp_path / "4")
    edit_config(tmp_path / "3", lambda config: config.update(mm_tokens_per_image=4))
    edit_config(tmp_path / "4", lambda config: config.update(vision_soft_tokens_per_image=60))
    with pytest.raises(ConfigError, match="image_seq_length is 16, mm_tokens_per_image 4"):
        processor_of(tmp_path / "3")
    with pytest.raises(ConfigError, match="max_soft_tokens of its image processor is 70, above"):
        processor_of(tmp_path / "4")
    edit_config(tmp_path / "3", lambda config: config["vision_config"].update(image_size=40))
    edit_config(tmp_path / "4", lambda config: config["vision_config"].update(patch_size=8))
    with pytest.raises(ConfigError, match="resized to 32 x 32, its encoder computes 40"):
        processor_of(tmp_path / "3")
    with pytest.raises(ConfigError, match="patch_size of its image processor is 4, of its encoder 8"):
        processor_of(tmp_path / "4")
