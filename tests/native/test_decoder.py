"""A decoder in one native call. That its logits are those of other kernels is tested in ``tests/model``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from tests.model.block_models import Plain, Rows, block_config, write_checkpoint
from tests.model.harness import attention_for, build_batch, fill

CPU = torch.device("cpu")


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
