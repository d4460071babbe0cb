"""Prompts with images go on in Qwen3-VL and Qwen3.5 as transformers has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from aioinfer.model.batch import Batch
from aioinfer.model.vision.base import Encoder, Features
from tests.images.checkpoints import picture
from tests.images.qwen_models import FAMILIES, IMAGE, greedy, qwen
from tests.images.test_qwen_prompts import processor_of, source
from tests.images.towers import features
from tests.model import harness
from tests.model.harness import load, require
from tests.tiers import SECONDS, rest


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text with images, and what a model needs of these."""

    ids: list[int]
    #: [3, prompt]
    rotary: torch.Tensor | None = None
    delta: int = 0
    #: numbers of the positions that are an image's, and [1 + deep, positions, hidden]
    places: list[int] = field(default_factory=list)
    vectors: torch.Tensor | None = None

    @classmethod
    def of(cls, path: Path, encoder: Encoder, text: str, sizes: list[tuple[int, int]]) -> Prompt:
        ours, tokenizer = processor_of(path), AutoTokenizer.from_pretrained(path)
        images = [ours.process(source(picture(*size))) for size in sizes]
        ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
        _, prompt = ours.fold(ids, images)
        if prompt.rotary is None:
            return cls(ids)
        places = [place for unit in prompt.units for place in range(unit.start, unit.stop)]
        vectors = torch.cat([features(encoder, dict(unit.pixels)) for unit in prompt.units], dim=1)
        return cls(ids, torch.from_numpy(prompt.rotary).long(), prompt.delta, places, vectors)

    def turned(self, start: int, count: int) -> torch.Tensor:
        """[3, count] from a position on."""
        positions = (torch.arange(start, start + count) + self.delta).repeat(3, 1)
        if self.rotary is not None:
            known = self.rotary[:, start : start + count]
            positions[:, : known.shape[1]] = known
        return positions


class Driver(harness.Driver):
    """Gives batches their images."""

    def see(self, prompts: list[Prompt], max_new: int, **options: Any) -> list[Any]:
        self.prompts = prompts
        return self.run([prompt.ids for prompt in prompts], max_new, **options)

    def finish(self, batch: Batch, order: list[Any]) -> None:
        rotary, rows, vectors, at = [], [], [], 0
        for seq, count in zip(order, batch.q_lens, strict=True):
            prompt = self.prompts[seq.number]
            rotary.append(prompt.turned(seq.done, count))
            here = [i for i, place in enumerate(prompt.places) if 0 <= place - seq.done < count]
            rows += [at + prompt.places[i] - seq.done for i in here]
            if prompt.vectors is not None:
                vectors.append(prompt.vectors[:, here])
            at += count
        if any(self.prompts[seq.number].rotary is not None for seq in order):
            batch.rotary = torch.cat(rotary, dim=1)
        if rows:
            batch.features = Features(torch.tensor(rows), torch.cat(vectors, dim=1).contiguous())


#: texts, and sizes of their images: two images, both orders, beside each other, first and last; and none
ASKED = [
    (f"what is {IMAGE} and {IMAGE}?", [(40, 20), (17, 64)]),
    (f"what is {IMAGE} and {IMAGE}?", [(17, 64), (40, 20)]),
    (f"{IMAGE}{IMAGE}", [(32, 32), (200, 100)]),
    ("only a text beside them, of some length", []),
]
TOKENS = 6


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_images_go_on_as_those_of_transformers(
    tmp_path: Path, family: str, kernels: Any
) -> None:
    require(kernels)
    oracle = qwen(tmp_path, family)
    model = load(tmp_path, kernels=kernels)
    prompts = [Prompt.of(tmp_path, model.encoder, *asked) for asked in ASKED]
    expected = [greedy(oracle, tmp_path, *asked, TOKENS) for asked in ASKED]
    for chunk, gap in ((7, 2), (512, 0)):
        driver = Driver(model, chunk=chunk, kernels=kernels)
        for found, (ids, logits) in zip(
            driver.see(prompts, TOKENS, gap=gap, all_logits=True), expected, strict=True
        ):
            assert found.ids == ids
            ours = torch.stack([found.logits[at] for at in range(len(ids) - 1)])
            torch.testing.assert_close(ours, logits, rtol=2e-3, atol=2e-3)


def test_a_text_beside_images_keeps_its_bits(tmp_path: Path) -> None:
    require("native")
    qwen(tmp_path)
    model = load(tmp_path, kernels="native")
    prompts = [Prompt.of(tmp_path, model.encoder, *asked) for asked in ASKED]
    alone = Driver(model, chunk=9, kernels="native").see(prompts[-1:], TOKENS)[0]
    beside = Driver(model, chunk=9, kernels="native").see(prompts, TOKENS)[-1]
    assert beside.ids == alone.ids
    assert all(torch.equal(beside.logits[at], alone.logits[at]) for at in alone.logits)
