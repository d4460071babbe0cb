"""LLaDA2 and SDAR: logits of prompt blocks, blocks being denoised and blocks being committed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from tests.model.block_models import (
    MASK,
    VOCAB,
    Plain,
    Rows,
    Tensors,
    block_config,
    write_checkpoint,
    write_config,
)
from tests.model.harness import build_batch, make_pool
from tests.model.kernels import DEVICES, kernels_or_skip
from tests.tiers import SLOW_MODEL, nightly

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


def prepare(path: Path, config: dict[str, Any], block: int, *, triton: str = "", **settings: Any) -> Rows:
    """``triton`` is the device that Triton's kernels run on."""
    tensors = write_checkpoint(path, config)
    kernels: dict[str, Any] = {"kernels": "triton", "experts": "triton"} if triton else {}
    if triton:
        from aioinfer.model.attention.triton_attention import TritonAttention

        settings |= {"attention": TritonAttention, "device": triton}
    device = torch.device(triton or "cpu")
    model = load_model(path, LoadOptions(dtype="float32", device=device, block_size=block, **kernels))
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


@pytest.mark.parametrize("block", [1, 2, 16, 32])
def test_blocks_of_any_size_over_pages_of_any_size(tmp_path: Path, block: int) -> None:
    page_size = 64 // block
    run(
        prepare(tmp_path, block_config(num_hidden_layers=2), block, page_size=page_size, num_pages=800), block
    )


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "tie_word_embeddings": True}])
@pytest.mark.parametrize("family", ["sdar", "sdar_moe"])
def test_sdar_is_what_its_description_says(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    run(prepare(tmp_path, block_config(family, **changes), 4), 4)


@pytest.mark.parametrize("family", ["sdar", "sdar_moe", "llada2"])
def test_transformers_computes_the_same_behind_a_mask_of_blocks(tmp_path: Path, family: str) -> None:
    """SDAR's layers are Qwen3's; LLaDA2's are GLM-4-MoE's by other names."""
    import transformers

    config = block_config(family)
    tensors = write_checkpoint(tmp_path, config)
    model = load_model(tmp_path, LoadOptions(dtype="float32", device=CPU, block_size=4))
    architecture = {"sdar": "Qwen3", "sdar_moe": "Qwen3Moe", "llada2": "Glm4Moe"}[family]
    twin = {**config, "architectures": [f"{architecture}ForCausalLM"]}
    twin["model_type"] = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "llada2": "glm4_moe"}[family]
    write_config(tmp_path, twin)
    if family == "llada2":
        changes = {"n_routed_experts": twin.pop("num_experts"), "n_shared_experts": 1, "use_qk_norm": True}
        write_config(tmp_path, {**twin, **changes})
        save_file(as_glm4(tensors, config), tmp_path / "model.safetensors")
    oracle_class = getattr(transformers, f"{architecture}ForCausalLM")
    oracle = oracle_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = tokens(22)
    of = torch.arange(len(ids)) // 4
    mask = torch.where(of[None, :] > of[:, None], torch.finfo(torch.float32).min, 0.0)[None, None]
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
    batch = build_batch([(ids, 0, [3, 1])], 16, num_decodes=0, logits_rows=range(len(ids)))
    got = model.forward(batch, SDPAAttention(make_pool(model.spec, 3, 16)))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def as_glm4(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """A LLaDA2 checkpoint under the names of GLM-4-MoE."""
    size = config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    names = {
        "word_embeddings": "embed_tokens", "attention.": "self_attn.", "query_layernorm": "q_norm",
        "key_layernorm": "k_norm", ".dense.": ".o_proj.", "gate.expert_bias": "gate.e_score_correction_bias",
    }  # fmt: skip
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "query_key_value" not in name:
            renamed[name] = tensor
            continue
        for part, rows in zip("qkv", tensor.split((q_rows, kv_rows, kv_rows)), strict=True):
            renamed[name.replace("query_key_value", f"{part}_proj")] = rows.clone()
    return renamed


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
    rows = prepare(tmp_path, block_config(num_hidden_layers=2), 8, triton=device)
    rows.step([("a", 0, tokens(16)), ("b", 0, [MASK] * 8)])
    rows.step([("a", 16, tokens(8)), ("b", 0, tokens(8)), ("b", 8, [MASK] * 8), ("a", 24, [MASK] * 8)])
