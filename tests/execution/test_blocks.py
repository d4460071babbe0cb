"""Steps of blocks: whatever rows they come in, a request's blocks are those of the plain reference."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aioinfer.diffusion.registry import algorithm_names
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.twin.blocks import ScriptedDevice
from tests.diffusion.cases import random_params
from tests.execution.block_driver import Driven, Driver, check

VOCAB, MASK = 32, 31


def make_requests(
    rng: random.Random, algorithms: list[str], size: int, page_size: int, drawn: bool = False
) -> list[Driven]:
    """Prompts of all lengths around whole blocks, a literal mask here and there."""
    requests = []
    for key, algorithm in enumerate(algorithms):
        length = rng.choice([0, size, 2 * size]) + rng.choice([1, size - 1, size, size + 1])
        prompt = [rng.choice([MASK, *range(VOCAB)]) for _ in range(length)]
        dice = np.random.default_rng(rng.randrange(1 << 30))
        sampling: dict[str, Any] = {"temperature": 0.0}
        if drawn and rng.random() < 0.6:
            sampling = {
                "temperature": rng.choice([0.5, 1.0]),
                "top_k": rng.choice([0, 3]),
                "top_p": rng.choice([1.0, 0.9]),
            }
        params = SamplingParams(
            **sampling, diffusion=DiffusionParams(algorithm=algorithm, **random_params(algorithm, dice))
        )
        pages = 12 * size // page_size
        requests.append(
            Driven(
                key,
                prompt,
                params,
                rng.randrange(1 << 40),
                key + 1,
                [1 + key * pages + at for at in range(pages)],
            )
        )
    return requests


def device(size: int, page_size: int, rows: int, **options: Any) -> ScriptedDevice:
    found = ScriptedDevice(
        num_pages=2 * rows * 12 * size // page_size,
        page_size=page_size,
        num_slots=3 * rows,
        block_size=size,
        vocab_size=VOCAB,
        edits=2,
        mean_steps=3,
        max_model_len=12 * size,
        **options,
    )
    found.open()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_any_kind_bring_the_blocks_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([4, 8])
    page_size = size * rng.choice([1, 2])
    requests = make_requests(
        rng, [*algorithm_names(), "low_confidence"], size, page_size, drawn=seed % 2 == 1
    )
    scripted = device(size, page_size, len(requests))
    driver = Driver(lambda step: scripted.launch(scripted.prepare(step)), requests, size, page_size, seed)
    driver.run(3)
    for request in requests:
        check(request, scripted.script, size, MASK)
