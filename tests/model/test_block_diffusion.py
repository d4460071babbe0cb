"""LLaDA2 and SDAR: logits of prompt blocks, blocks being denoised and blocks being committed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.loader import load_model
from tests.model.block_models import MASK, VOCAB, Plain, Rows, block_config, write_checkpoint

CPU = torch.device("cpu")
SHAPES = {
    "grouped-queries": {},
    "as-many-keys-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "one-group-whole-rotary": {"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0},
    "two-groups-two-shared": {"n_group": 2, "topk_group": 1, "num_shared_experts": 2},
    "no-shared-no-dense-layer": {"num_shared_experts": 0, "first_k_dense_replace": 0, "topk_group": 4},
    "one-expert": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "biases-one-key-head": {"use_qkv_bias": True, "use_bias": True, "num_key_value_heads": 1},
    "dense": {"num_experts": None},
    "quarter-rotary": {"partial_rotary_factor": 0.25, "head_dim": 24},
}


def prepare(path: Path, config: dict[str, Any], block: int, **settings: Any) -> Rows:
    tensors = write_checkpoint(path, config)
    model = load_model(path, dtype="float32", device=CPU, block_size=block)
    assert (model.spec.block_size, model.spec.mask_token_id) == (block, MASK)
    assert model.spec.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    return Rows(model, Plain(config, tensors, block), **settings)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def run(rows: Rows, block: int) -> None:
    """Three requests: a prompt at once, one by blocks, one without whole blocks; then everything mixed."""
    masks = [MASK] * block
    a, b = tokens(4 * block, 1), tokens(3 * block, 2)
    rows.step([("a", 0, a)])
    # One prompt goes on by whole blocks while another request denoises, its prompt's tail fixed.
    rows.step([("b", 0, b[:block]), ("a", 4 * block, masks)])
    half = [*tokens(block // 2, 3), *masks[block // 2 :]]
    rows.step([("a", 4 * block, half), ("b", block, b[block:]), ("c", 0, masks)])
    # Commits and the blocks behind them in one step, in any order of rows, and a fresh prompt besides.
    done = tokens(block, 4)
    rows.step(
        [
            ("c", 0, tokens(block, 5)),
            ("a", 4 * block, done),
            ("d", 0, tokens(2 * block, 6)),
            ("a", 5 * block, masks),
            ("c", block, masks),
            ("b", 3 * block, [*tokens(1, 7), *masks[1:]]),
        ]
    )
    rows.step([("c", block, half), ("a", 5 * block, half), ("b", 3 * block, half), ("d", 2 * block, masks)])


@pytest.mark.parametrize("shape", SHAPES)
def test_llada2_is_what_its_description_says(tmp_path: Path, shape: str) -> None:
    run(prepare(tmp_path, block_config(**SHAPES[shape]), 8), 8)
