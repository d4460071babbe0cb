"""Block diffusion models: what their configs and checkpoints may be, and a clear word for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.blocks import Blocks
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.moe.sparse import SparseMLP
from tests.model.block_models import VOCAB, Plain, Rows, block_config, write_checkpoint, write_config
from tests.model.checkpoints import make_checkpoint
from tests.model.harness import build_batch, load, make_pool
from tests.tiers import SECONDS, rest

CPU = torch.device("cpu")


def inspect(path: Path, **options: Any) -> Any:
    return inspect_model(path, LoadOptions(dtype="auto", device=CPU, load_format="random", **options))


@pytest.mark.parametrize(
    ("family", "words", "usual"),
    [
        ("llada2", 157184, Blocks(32, 156895)),
        ("sdar", 151936, Blocks(4, 151669)),
        ("sdar_moe", 151936, Blocks(4, 151669)),
    ],
)
def test_who_decides_on_the_blocks(tmp_path: Path, family: str, words: int, usual: Blocks) -> None:
    """The user, then the config, then what is usual in the family."""
    config = block_config(family, vocab_size=words, mask_token_id=None)
    write_config(tmp_path, config)
    assert inspect(tmp_path).blocks == usual
    assert inspect(tmp_path, block_size=1).blocks == Blocks(1, usual.mask_token_id)
    write_config(tmp_path, {**config, "block_size": 16, "mask_token_id": 0})
    assert inspect(tmp_path).blocks == Blocks(16, 0)
    assert inspect(tmp_path, block_size=8).blocks == Blocks(8, 0)
    write_config(tmp_path, {**config, "delete_token_id": 2, "split_token_id": 1})
    assert inspect(tmp_path).blocks == Blocks(usual.size, usual.mask_token_id, (2, 1))


def test_experts_that_blocks_share_want_blocks_of_their_size(tmp_path: Path) -> None:
    config = block_config(expert_capacity=4, block_size=16)
    write_checkpoint(tmp_path, config)
    assert load(tmp_path).spec.block_size == 16
    with pytest.raises(ConfigError, match="block_size: LLaDA2MoeModelLM chooses experts by blocks of 16"):
        load(tmp_path, block_size=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "the config's block_size .* power of two, got 0"),
        ({"block_size": 12}, "power of two, got 12"),
        ({"block_size": "8"}, "power of two, got '8'"),
        ({"block_size": True}, "power of two, got True"),
        ({"mask_token_id": None}, "mask token .* would be 156895, outside its 101 tokens"),
        ({"mask_token_id": VOCAB}, "mask token .* would be 101, .* must state its mask_token_id"),
        ({"mask_token_id": -1}, "mask token .* would be -1"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be"),
        (
            {"intermediate_size": 0},
            "^(?!moe).* intermediate_size in config.json must be an integer in .*, got 0",
        ),
        ({"expert_capacity": 2, "block_size": 8}, "cannot choose 3 of 2 of 8 experts"),
        ({"expert_capacity": 9, "block_size": 8}, "cannot choose 3 of 9 of 8 experts"),
        ({"expert_capacity": 0}, "expert_capacity must be a positive integer, got 0"),
        ({"delete_token_id": 3}, "delete_token_id and split_token_id of .*; got 3 and None"),
        ({"delete_token_id": 3, "split_token_id": VOCAB}, "of its 101, and not the mask; got 3 and 101"),
        ({"delete_token_id": 3, "split_token_id": 3}, "must be two tokens"),
        ({"delete_token_id": 3, "split_token_id": VOCAB - 1}, "not the mask; got 3 and 100"),
        ({"n_group": 3}, "cannot choose 3 of 8 experts in 2 of 3 groups"),
        ({"topk_group": 1}, "cannot choose 3 of 8 experts in 1 of 4 groups"),
        ({"num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
        ({"score_function": "softmax"}, "with routing by softmax is not supported"),
        ({"norm_head": True}, "with a normed head is not supported"),
        ({"hidden_act": "gelu"}, "with the activation gelu is not supported"),
        ({"partial_rotary_factor": 0.2}, "with its kind of rotary positions is not supported"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor in .* must be a positive number"),
        ({"partial_rotary_factor": 2.0}, "with its kind of rotary positions is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions is not supported"),
    ],
)
def test_a_config_that_cannot_be_computed_says_why(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_config(tmp_path, block_config(**changes))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, load_format="random")


def test_what_is_asked_of_the_wrong_model_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "qwen3")
    write_config(tmp_path, block_config())
    for size in (0, 3, -4):
        with pytest.raises(ConfigError, match=f"model: block_size .* power of two, got {size}"):
            inspect(tmp_path, block_size=size)
    for call in (inspect, lambda path, **asked: load(path, load_format="random", **asked)):
        with pytest.raises(ConfigError, match="Qwen3ForCausalLM writes token after token"):
            call(tmp_path / "qwen3", block_size=4)
        with pytest.raises(ConfigError, match="transformers has no implementation of LLaDA2MoeModelLM"):
            call(tmp_path, force_transformers=True)
    assert load(tmp_path / "qwen3").spec.block_size is None
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        inspect(tmp_path)


def test_experts_merged_by_dfactory(tmp_path: Path) -> None:
    config = block_config(model_type="llada2_moe_veomni")
    tensors = write_checkpoint(tmp_path, config)
    merged = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (1, 2):
        at = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_proj", "up_proj", "down_proj"):
            merged[f"{at}.{name}"] = torch.stack([tensors[f"{at}.{e}.{name}.weight"] for e in range(8)])
    assert len(merged) < len(tensors)
    save_file(merged, tmp_path / "model.safetensors")
    Rows(load(tmp_path), Plain(config, tensors, 32)).step([("a", 0, list(range(64)))])


def test_a_routers_weights_keep_the_precision_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, block_config())
    model = load(tmp_path, dtype="bfloat16")
    mlp = model._trunk.layers[1].mlp
    assert isinstance(mlp, SparseMLP)
    router: Any = mlp.router
    assert torch.equal(router.weight, tensors["model.layers.1.mlp.gate.weight"])
    assert torch.equal(router.bias, tensors["model.layers.1.mlp.gate.expert_bias"])
    assert mlp.shared is not None
    assert mlp.shared.down(torch.zeros(1, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_the_config_does_without_must_not_be_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, block_config())
    for changes in (
        {"use_qk_norm": False},
        {"moe_router_enable_expert_bias": False},
        {"num_shared_experts": 0},
    ):
        write_config(tmp_path, block_config(**changes))
        with pytest.raises(ConfigError, match="unexpected tensors"):
            load(tmp_path)


def test_nulls_in_the_config_are_no_groups_and_no_dense_layer(tmp_path: Path) -> None:
    config = block_config()
    nulls = dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_shared_experts"))
    write_config(tmp_path, {**config, **nulls})
    model = load(tmp_path, load_format="random")
    assert all(isinstance(layer.mlp, SparseMLP) and layer.mlp.shared is None for layer in model._trunk.layers)
    assert model._trunk.layers[0].mlp.router.num_groups == 1


@rest(SECONDS)
def test_random_weights_of_a_small_llada2_mini(tmp_path: Path) -> None:
    """Its shape, with sizes divided by eight."""
    shape = {"hidden_size": 256, "num_hidden_layers": 20, "num_attention_heads": 16, "num_experts": 32}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 640, "moe_intermediate_size": 64, "n_group": 8}
    write_config(tmp_path, block_config(**shape, topk_group=4, num_experts_per_tok=8))
    model = load(tmp_path, load_format="random", dtype="bfloat16", kernels="sdpa")
    attention = SDPAAttention(make_pool(model.spec, 4, 32))
    batch = build_batch([(list(range(64)), 0, [2, 1])], 32, num_decodes=0, logits_rows=range(64))
    with torch.inference_mode():
        logits = model.forward(batch, attention).float()
    assert logits.shape == (64, VOCAB)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2


@pytest.mark.parametrize("family", ["llada2", "sdar", "sdar_moe"])
def test_the_doctor_knows_them(tmp_path: Path, family: str) -> None:
    write_config(tmp_path, block_config(family))
    config = EngineConfig(model=str(tmp_path), load_format="random", device="cpu")
    findings = examine(config)
    assert not any(finding.fatal for finding in findings)
    assert ("experts" in {finding.subject for finding in findings}) == (family != "sdar")
