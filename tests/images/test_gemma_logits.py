"""Gemma's logits of prompts with images equal transformers', in any chunks that keep an image whole, and the
engine generates what transformers does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from aioinfer import LLM, EngineConfig, SamplingParams
from aioinfer.images.prompt import PromptImages
from aioinfer.model.vision.base import Features
from tests.images.checkpoints import picture
from tests.images.gemma import gemma3, gemma4
from tests.images.test_prompts import processor_of, source
from tests.images.test_towers import said
from tests.images.towers import features
from tests.model.harness import attention_for, build_batch, fill, load, require
from tests.model.kernels import kernels_or_skip
from tests.tiers import SECONDS, rest

SIZES = [(40, 30), (30, 70), (40, 30)]
#: relative to the largest logit: so far are those of transformers from the same in float64
CLOSE = 1e-4
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}
#: name -> (function that writes it, arguments, the token of an image)
MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gemma3": (gemma3, {}, "<start_of_image>"),
    "gemma3-crops": (gemma3, {"crops": True, "sliding_window": 9}, "<start_of_image>"),
    "gemma4": (gemma4, SHARED, "<|image|>"),
    "gemma4-two-way": (gemma4, {**SHARED, "use_bidirectional_attention": "vision"}, "<|image|>"),
    "gemma4-clipped": (gemma4, {"clipped": True, "use_bidirectional_attention": "vision"}, "<|image|>"),
}


@pytest.fixture(params=["sdpa", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


def prompt(path: Path, placeholder: str) -> tuple[list[int], PromptImages]:
    """The ids of a prompt with image tokens where its images are."""
    ours, tokenizer = processor_of(path), AutoTokenizer.from_pretrained(path)
    images = [ours.process(source(*size, seed)) for seed, size in enumerate(SIZES)]
    text = f"{placeholder}Look at{placeholder}{placeholder} and say"
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    return ids, ours.fold(ids, images)[1]


def expected_logits(oracle: Any, ids: list[int], images: PromptImages) -> torch.Tensor:
    """[prompt, vocabulary] by transformers."""
    types = torch.zeros(1, len(ids), dtype=torch.int64)
    for unit in images.units:
        types[0, unit.start : unit.stop] = 1
    pixels = [unit.pixels for unit in images.units]
    if "grid" not in pixels[0]:
        values = torch.from_numpy(np.stack([each["pixel_values"] for each in pixels]))
        given = {"pixel_values": values, "token_type_ids": types}
    else:
        most = 4 * 70
        padded = torch.zeros(len(pixels), most, 48)
        places = torch.full((len(pixels), most, 2), -1)
        for at, each in enumerate(pixels):
            rows, columns = each["grid"]
            padded[at, : rows * columns] = torch.from_numpy(each["patches"])
            grid = np.meshgrid(np.arange(columns), np.arange(rows))
            places[at, : rows * columns] = torch.from_numpy(np.stack(grid, -1).reshape(-1, 2))
        given = {"pixel_values": padded, "image_position_ids": places, "mm_token_type_ids": types}
    with torch.no_grad():
        logits: torch.Tensor = oracle(input_ids=torch.tensor([ids]), use_cache=False, **given).logits[0]
    return logits


def chunked(model: Any, kernels: Any, ids: list[int], images: PromptImages, cuts: list[int]) -> torch.Tensor:
    """The logits of all positions, by chunks that end at ``cuts``; some chunks have no image."""
    support = model.encoder.support
    vectors = [features(model.encoder, unit.pixels)[0] for unit in images.units]
    filler = support.token_id if support.filler_id is None else support.filler_id
    attention = attention_for(model.spec, 60, 8, kernels)
    fill(attention, float("nan"))
    found = []
    for start, stop in pairwise([0, *cuts, len(ids)]):
        chunk, ends, rows, parts = ids[start:stop], torch.arange(start + 1, stop + 1), [], []
        for unit, vector in zip(images.units, vectors, strict=True):
            if start <= unit.start < stop:
                assert unit.stop <= stop
                at = range(unit.start - start, unit.stop - start)
                chunk[at.start : at.stop] = [filler] * len(at)
                ends[at.start : at.stop] = unit.stop
                rows += at
                parts.append(vector)
        batch = build_batch(
            [(chunk, start, list(range(1, 61)))], 8, num_decodes=0, logits_rows=range(stop - start)
        )
        if rows:
            batch.features = Features(torch.tensor(rows), torch.cat(parts)[None])
            batch.ends = ends if support.two_way else None
        with torch.inference_mode():
            found.append(model.forward(batch, attention))
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    make, arguments, placeholder = MODELS[name]
    oracle = make(tmp_path, **arguments)
    model = load(tmp_path, kernels=kernels)
    assert model.spec.images.two_way == (name != "gemma4")
    ids, images = prompt(tmp_path, placeholder)
    expected = expected_logits(oracle, ids, images)
    whole = chunked(model, kernels, ids, images, [])
    assert (whole - expected).abs().max() <= CLOSE * expected.abs().max()
    first, second = images.units[:2]
    for cuts in ([first.start, first.stop, second.start], [first.stop + 1, images.units[-1].start]):
        apart = chunked(model, kernels, ids, images, cuts)
        if kernels == "native":
            assert torch.equal(apart, whole), cuts
        assert (apart - expected).abs().max() <= CLOSE * expected.abs().max()


TOKENS = 6


@rest(SECONDS)
@pytest.mark.parametrize("name", ["gemma3-crops", "gemma4", "gemma4-two-way"])
def test_the_engine_goes_on_as_transformers_does(tmp_path: Path, name: str) -> None:
    """Two prompts at once, by chunks of any size, without a cache and with one."""
    make, arguments, placeholder = MODELS[name]
    oracle = make(tmp_path, **arguments)
    ours, tokenizer = processor_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    asked, expected = [], []
    for number, size in enumerate(SIZES[:2]):
        seeds = [number, number + 7]
        pictures = [{"type": "image", "image": picture(*size, seed)} for seed in seeds]
        chat = [{"role": "user", "content": [pictures[0], {"type": "text", "text": "or"}, pictures[1]]}]
        asked.append(chat)
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text.count(placeholder) == 2
        images = [ours.process(source(*size, seed)) for seed in seeds]
        ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
        units, start = ours.fold(ids, images)[1], len(ids)
        # What transformers makes of a generated image token, the next image, is nothing to compare.
        while len(ids) < start + TOKENS and ours.token_id not in ids[start:]:
            ids.append(int(expected_logits(oracle, ids, units)[-1].argmax()))
        expected.append(ids[start:])
    assert sum(map(len, expected)) > TOKENS
    for chunk in (7, 80, 1024):
        config = EngineConfig(
            model=str(tmp_path), device="cpu", num_pages=120, page_size=8, threads=1, dtype="float32",
            chunk_size=chunk,
        )  # fmt: skip
        with LLM(config) as llm:
            for _ in range(2):
                params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
                found = llm.generate(asked, params)
                for each, ids in zip(found, expected, strict=True):
                    assert each.token_ids[: len(ids)] == ids, chunk


def test_attention_that_cannot_see_both_ways_leaves_images_out(tmp_path: Path) -> None:
    kernels_or_skip("cpu")
    gemma3(tmp_path / "both ways")
    gemma4(tmp_path / "one way")
    assert load(tmp_path / "both ways", kernels="triton").spec.images is None
    assert "attention by triton cannot see them" in str(
        said(tmp_path / "both ways", attention_backend="triton")
    )
    assert load(tmp_path / "one way", kernels="triton").spec.images is not None
    assert said(tmp_path / "one way", attention_backend="triton") == "are read by its own encoder"
