"""Models in GGUF files with their image encoders in files of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.checkpoint.files import Checkpoint, checkpoint_at
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import PromptImages
from aioinfer.images.source import ImageSource
from tests.checkpoint.mmproj_models import MODEL, write_pair
from tests.images.checkpoints import picture, smolvlm
from tests.images.gemma import gemma3
from tests.images.internvl_models import internvl
from tests.images.towers import features
from tests.model.harness import load

FAMILIES: dict[str, Callable[..., Any]] = {
    "idefics3": partial(smolvlm, family="Idefics3"),
    "gemma3": gemma3,
    "internvl": internvl,
}
SIZES = [(96, 40), (17, 33), (64, 64)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    """The checkpoint of a family, with its files in ``pair``."""
    for name in ("whole", "pair"):
        (tmp_path / name).mkdir()
    FAMILIES[family](tmp_path / "whole")
    write_pair(tmp_path / "whole", tmp_path / "pair")
    return tmp_path


def prompt(checkpoint: Checkpoint) -> tuple[list[int], PromptImages]:
    """The ids of a text with images, and these."""
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    images = ImageProcessor.of(checkpoint, tokenizer.get_added_vocab())
    assert images is not None
    processed = [images.process(ImageSource(picture(*size).tobytes(), size)) for size in SIZES]
    text = images.expand(images.placeholder.join(["first", " and ", "", "?"]), processed)
    ids = tokenizer.encode(text, add_special_tokens=False)
    _, found = images.fold(ids, processed)
    return ids, found


def test_ids_pixels_and_features_are_those_of_the_checkpoint(folder: Path) -> None:
    ids, images = prompt(checkpoint_at(folder / "whole"))
    found, others = prompt(checkpoint_at(folder / "pair" / MODEL, mmproj=True))
    assert found == ids
    whole, pair = (load(folder / name, kernels="sdpa") for name in ("whole", f"pair/{MODEL}"))
    assert pair.spec.images == whole.spec.images
    assert pair.spec.part == whole.spec.part
    assert pair.spec.num_parameters == whole.spec.num_parameters
    for one, other in zip(images.units, others.units, strict=True):
        assert (one.start, one.length, one.patches) == (other.start, other.length, other.patches)
        for name, pixels in one.pixels.items():
            np.testing.assert_array_equal(pixels, other.pixels[name])
        expected = features(whole.encoder, dict(one.pixels))
        torch.testing.assert_close(features(pair.encoder, dict(other.pixels)), expected, rtol=1e-5, atol=1e-6)
