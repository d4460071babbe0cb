"""LLaDA2 and SDAR: logits of prompt blocks, blocks being denoised and blocks being committed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from aioinfer.native.bindings import ThreadPool
from tests.model.block_models import MASK, VOCAB, Plain, Rows, block_config, write_checkpoint
from tests.model.harness import build_batch, fill, require
from tests.model.kernels import DEVICES, kernels_or_skip
from tests.tiers import SLOW_MODEL, nightly

_ONE_HEAD = {"num_key_value_heads": 1, "tie_word_embeddings": True}
SHAPES = {
    "grouped-queries": {},
    "as-many-keys-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "one-group-whole-rotary": {"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0},
    "two-groups-two-shared": {"n_group": 2, "topk_group": 1, "num_shared_experts": 2},
    "no-shared-no-dense-layer": {"num_shared_experts": 0, "first_k_dense_replace": 0, "topk_group": 4},
    "one-expert": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "biases-one-key-head": {"use_qkv_bias": True, "use_bias": True, "num_key_value_heads": 1},
    "dense": {"num_experts": None},
    "experts-of-a-block": {"expert_capacity": 4, "block_size": 8},
    "as-many-as-a-token-has": {"expert_capacity": 3, "block_size": 8},
    "quarter-rotary": {"partial_rotary_factor": 0.25, "head_dim": 24},
}
#: length of a block, and the changes to the config
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"llada2-{name}": (8, changes) for name, changes in SHAPES.items()},
    **{family: (4, {"family": family}) for family in ("sdar", "sdar_moe")},
    **{f"{family}-one-head": (4, {"family": family, **_ONE_HEAD}) for family in ("sdar", "sdar_moe")},
}
#: what native layers take: multiples of 16
WIDE = {"intermediate_size": 48, "moe_intermediate_size": 16}


def native_attention(pool: KVPool) -> NativeAttention:
    """Over as many pages as a pool has, with NaN in all of them."""
    layers = [KVShape(*keys.shape[2:]) for keys in pool.keys]
    sizes = {"num_pages": len(pool.keys[0]) - 1, "page_size": pool.page_size}
    attention = NativeAttention(ThreadPool(2), layers, dtype=pool.dtype, **sizes)  # type: ignore[arg-type]
    fill(attention, float("nan"))
    return attention


def prepare(
    path: Path,
    config: dict[str, Any],
    block: int,
    kernels: Any = "sdpa",
    device: str = "cpu",
    **settings: Any,
) -> Rows:
    tensors = write_checkpoint(path, config)
    options: dict[str, Any] = {"dtype": "float32", "device": torch.device(device), "block_size": block}
    made: Any = native_attention if kernels == "native" else SDPAAttention
    if kernels == "triton":
        from aioinfer.model.attention.triton_attention import TritonAttention as made

        options["experts"] = "triton"
    model = load_model(path, LoadOptions(**options, kernels=kernels))
    assert isinstance(model, NativeDecoder) == (kernels == "native")
    assert (model.spec.block_size, model.spec.mask_token_id) == (block, MASK)
    assert model.spec.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    return Rows(model, Plain(config, tensors, block), attention=made, device=device, **settings)


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
    # Commits and the blocks after them in one step, in any order of rows, and a fresh prompt besides.
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


#: native kernels compute whole vectors, which odd heads are not, and choose experts for a token by itself
_NOT_NATIVE = {"head_dim", "expert_capacity"}
BY_KERNELS = [(name, "sdpa") for name in MODELS] + [
    (name, "native") for name, (_, changes) in MODELS.items() if not changes.keys() & _NOT_NATIVE
]


@pytest.mark.parametrize(("name", "kernels"), BY_KERNELS)
def test_logits_are_those_of_transformers_with_a_mask_of_blocks(
    tmp_path: Path, name: str, kernels: str
) -> None:
    require(kernels)
    block, changes = MODELS[name]
    sizes = WIDE if kernels == "native" else {}
    rows = prepare(tmp_path, block_config(**sizes, **changes), block, kernels)
    sparse = changes.get("family") != "sdar" and "num_experts" not in changes
    expected = {"native": "native", "sdpa": "grouped"}[kernels] if sparse else None
    assert rows.model.spec.expert_kernels == expected
    run(rows, block)


@pytest.mark.parametrize("block", [1, 2, 16, 32])
def test_blocks_of_any_size_over_pages_of_any_size(tmp_path: Path, block: int) -> None:
    sizes = {"page_size": 64 // block, "num_pages": 800}
    run(prepare(tmp_path, block_config(num_hidden_layers=2), block, **sizes), block)


def test_logits_of_any_tokens_in_any_order(tmp_path: Path) -> None:
    rows = prepare(tmp_path, block_config(), 8)
    batch = build_batch([(tokens(24), 0, [1, 2])], 16, num_decodes=0, logits_rows=range(24))
    every = rows.model.forward(batch, rows.attention)
    for wanted in ([23, 0, 7, 8, 7], [5], []):
        batch.logits_rows = torch.tensor(wanted, dtype=torch.int64)
        got = rows.model.forward(batch, rows.attention)
        torch.testing.assert_close(got, every[wanted], rtol=1e-5, atol=1e-5)


@nightly(SLOW_MODEL)
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_on_tritons_kernels(tmp_path: Path, device: str) -> None:
    kernels_or_skip(device)
    rows = prepare(tmp_path, block_config(num_hidden_layers=2), 8, "triton", device)
    rows.step([("a", 0, tokens(16)), ("b", 0, [MASK] * 8)])
    rows.step([("a", 16, tokens(8)), ("b", 0, tokens(8)), ("b", 8, [MASK] * 8), ("a", 24, [MASK] * 8)])
