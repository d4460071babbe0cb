"""A decoder in one native call against the same model layer by layer in torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from tests.model.block_models import Plain, Rows, block_config, write_checkpoint
from tests.model.checkpoints import NATIVE, RECURRENT, VOCAB
from tests.model.harness import attention_for, build_batch, fill, row_states, state_pool
from tests.tiers import SECONDS, rest, thinned

CPU = torch.device("cpu")
DENSE = [family for family in [*NATIVE, *RECURRENT] if "moe" not in family and family != "qwen3-next"]
#: (length, start) of the rows of a step: decodes, a chunk, whole prompts
ROWS = [(40, 39), (17, 16), (60, 22), (1, 0), (33, 0)]


def logits(path: Path, kernels: Any, dtype: str, seed: int) -> torch.Tensor:
    """Of some tokens, in no order, of a step over pages that hold NaN but for what rows have stored."""
    rng = random.Random(seed)
    model = load_model(path, LoadOptions(dtype=dtype, device=CPU, kernels=kernels))
    assert isinstance(model, NativeDecoder if kernels == "native" else Decoder)
    attention = attention_for(model.spec, 60, 8, kernels)
    fill(attention, float("nan"))
    # Every row has two cells: one of them for what is in front of the step.
    states, cells = state_pool(model.spec, 2 * len(ROWS)), list[tuple[int, int]]()
    free = rng.sample(range(1, 61), 60)
    rows = []
    for at, (length, start) in enumerate(ROWS):
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        pages = [free.pop() for _ in range(-(-length // 8))]
        if start:
            past = row_states(states, [(0, 2 * at + 1)])
            model.forward(build_batch([(ids[:start], 0, pages)], 8, num_decodes=0, states=past), attention)
        cells.append((2 * at + 1 if start else 0, 2 * at + 2))
        rows.append((ids[start:], start, pages))
    tokens = sum(len(ids) for ids, _, _ in rows)
    wanted = [rng.randrange(tokens) for _ in range(rng.choice([1, 5, 20, 100]))]
    with torch.inference_mode():
        own = row_states(states, cells)
        batch = build_batch(rows, 8, num_decodes=2, logits_rows=wanted, states=own)
        return model.forward(batch, attention).float()


@pytest.mark.parametrize("family", thinned(DENSE, 3))
def test_in_float32_its_logits_are_those_of_torchs_layers(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str
) -> None:
    path, _ = checkpoint(family)
    for seed in range(2):
        got, wanted = (logits(path, kernels, "float32", seed) for kernels in ("native", "sdpa"))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5 * float(wanted.abs().max()))


@rest(SECONDS)
@pytest.mark.parametrize("family", thinned(DENSE, 3))
def test_in_bfloat16_it_is_as_close_to_float32_as_torchs_layers(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str
) -> None:
    """It rounds less often than they do. The bound allows for chance: 20 rows and more."""
    path, _ = checkpoint(family)
    distance = {"native": 0.0, "sdpa": 0.0}
    for seed in (0, 3):
        exact = logits(path, "sdpa", "float32", seed)
        for kernels in distance:
            distance[kernels] += float((logits(path, kernels, "bfloat16", seed) - exact).pow(2).sum())
    assert 0 < distance["native"] < 1.5 * distance["sdpa"]


@pytest.mark.parametrize("page_size", [3, 16])
def test_blocks_of_sdar_denoise_as_they_are_described(tmp_path: Path, page_size: int) -> None:
    config = block_config("sdar", intermediate_size=48)
    tensors = write_checkpoint(tmp_path, config)
    model = load_model(tmp_path, LoadOptions(dtype="float32", device=CPU, kernels="native", block_size=4))
    assert isinstance(model, NativeDecoder)

    def native(pool: object) -> Any:
        attention = attention_for(model.spec, 64, page_size, "native")
        fill(attention, float("nan"))
        return attention

    rng = random.Random(0)
    rows = Rows(model, Plain(config, tensors, 4), page_size=page_size, attention=native)

    def draw(count: int) -> list[int]:
        return [rng.randrange(100) for _ in range(count)]

    rows.step([("a", 0, draw(20)), ("b", 0, draw(8))])
    rows.step([("a", 20, draw(4)), ("b", 8, draw(16)), ("c", 0, draw(4))])
    # The same block again with other tokens, and the next block, which sees it.
    rows.step([("a", 20, draw(4)), ("a", 24, draw(4)), ("c", 0, draw(4))])


def test_it_counts_where_its_time_goes(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    model = load_model(checkpoint("qwen3")[0], LoadOptions(dtype="float32", device=CPU, kernels="native"))
    assert isinstance(model, NativeDecoder)
    assert set(model.seconds.values()) == {0.0}
    model.forward(
        build_batch([([1, 2], 0, [1])], 8, num_decodes=0), attention_for(model.spec, 2, 8, "native")
    )
    assert all(seconds > 0 for seconds in model.seconds.values())
