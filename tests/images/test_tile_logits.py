"""SmolVLM's, Idefics 3's and InternVL's logits of prompts with images equal transformers', in any chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from aioinfer.images.prompt import PromptImages
from aioinfer.model.vision.base import Features
from tests.images.checkpoints import smolvlm
from tests.images.internvl_models import internvl
from tests.images.test_prompts import processor_of, source
from tests.images.towers import features
from tests.model.harness import attention_for, build_batch, fill, load, require

PAGE, PAGES = 8, 60
#: relative to the largest logit
CLOSE = 1e-4


class Case(NamedTuple):
    """A model, what stands for an image in a prompt, and sizes of images."""

    make: Callable[[Path], Any]
    placeholder: str
    sizes: tuple[tuple[int, int], ...]
    #: transformers takes images in a list for each prompt
    listed: bool


SIZES = (40, 80), (32, 32), (17, 33)
MODELS = {
    "smolvlm": Case(smolvlm, "<image>", SIZES, listed=True),
    "idefics3": Case(partial(smolvlm, family="Idefics3"), "<image>", SIZES, listed=True),
    "internvl": Case(internvl, "<IMG_CONTEXT>", ((40, 20), (16, 16), (17, 64)), listed=False),
}


def prompt(path: Path, case: Case) -> tuple[list[int], PromptImages]:
    """The ids of a prompt that begins and ends with an image, and two that have nothing between them."""
    ours, tokenizer = processor_of(path), AutoTokenizer.from_pretrained(path)
    images = [ours.process(source(*size, seed)) for seed, size in enumerate(case.sizes)]
    text = f"{case.placeholder} and {case.placeholder}{case.placeholder}"
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    return ids, ours.fold(ids, images)[1]


def chunked(model: Any, kernels: Any, ids: list[int], images: PromptImages, size: int) -> torch.Tensor:
    """The logits of all positions, by chunks of a size, which cut tiles."""
    vectors = torch.cat([features(model.encoder, dict(unit.pixels)) for unit in images.units], dim=1)
    places = torch.tensor([place for unit in images.units for place in range(unit.start, unit.stop)])
    attention = attention_for(model.spec, PAGES, PAGE, kernels)
    fill(attention, float("nan"))
    found = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        row = chunk, start, list(range(1, PAGES))
        batch = build_batch([row], PAGE, num_decodes=0, logits_rows=range(len(chunk)))
        inside = (places >= start) & (places < start + size)
        if inside.any():
            batch.features = Features(places[inside] - start, vectors[:, inside])
        with torch.inference_mode():
            found.append(model.forward(batch, attention))
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    require(kernels)
    case = MODELS[name]
    oracle = case.make(tmp_path)
    ids, images = prompt(tmp_path, case)
    assert len(ids) < PAGE * (PAGES - 1)
    pixels = torch.from_numpy(np.stack([unit.pixels["pixel_values"] for unit in images.units]))
    given = {"input_ids": torch.tensor([ids]), "pixel_values": pixels[None] if case.listed else pixels}
    with torch.no_grad():
        expected = oracle(**given, use_cache=False).logits[0]
        blind = oracle(input_ids=given["input_ids"], use_cache=False).logits[0]
    close = CLOSE * expected.abs().max()
    assert (blind - expected).abs().max() > 100 * close
    model = load(tmp_path, kernels=kernels)
    whole = chunked(model, kernels, ids, images, len(ids))
    assert (whole - expected).abs().max() < close
    for size in (7, 33):
        found = chunked(model, kernels, ids, images, size)
        assert (found - expected).abs().max() < close
        if kernels == "native":
            assert torch.equal(found, whole)
