"""GGUF files of models with experts, recurrent layers or heads that differ: what only these files have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from aioinfer.checkpoint.files import open_checkpoint
from aioinfer.checkpoint.formats.base import dequantised
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError
from aioinfer.model.updates.recipe import prepare_update
from tests.checkpoint.gguf_models import make_family, write_file, write_gguf
from tests.model.checkpoints import assert_greedy
from tests.model.harness import load, require
from tests.native.support import prompt_logits
from tests.tiers import SECONDS, rest

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 2]]
_BLOCK = re.compile(r"blk\.\d+\.")


def contents(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors as :func:`write_file` takes them."""
    metadata = {name: value for name, value in file.metadata.items() if name != "general.architecture"}
    tensors = {name: stored.data.view("<f4").reshape(stored.shape) for name, stored in file.tensors.items()}
    return metadata, tensors


def first_of_each_part(names: Any) -> list[str]:
    """A tensor of every name, whatever its layer."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(_BLOCK.sub("", name), name)
    return list(found.values())


#: by family: numbers of the metadata that contradict its tensors
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "expert_count": 5, "expert_used_count": 7, "expert_feed_forward_length": 64, "embedding_length": 32,
        "attention.head_count": 3, "attention.head_count_kv": 4, "attention.key_length": 32,
        "attention.sliding_window_pattern": [True], "block_count": 4, "nextn_predict_layers": 1,
    },
    "gemma4-shared": {
        "attention.shared_kv_layers": 6, "attention.sliding_window_pattern": [True, False],
        "attention.key_length_swa": 24, "attention.key_length": 48, "attention.head_count_kv": 2,
        "feed_forward_length": [80] * 5, "embedding_length_per_layer_input": 8, "block_count": 7,
        "rope.dimension_count_swa": 8, "attention.value_length_swa": 8, "attention.head_count": 3,
    },
    "gemma4-experts": {
        "expert_count": 7, "expert_used_count": 9, "expert_feed_forward_length": 24,
        "attention.head_count_kv": [2, 1], "attention.sliding_window_pattern": [True, True, True],
    },
    "qwen3.5": {
        "ssm.conv_kernel": 3, "ssm.state_size": 32, "ssm.group_count": 3, "ssm.time_step_rank": 8,
        "ssm.inner_size": 191, "attention.recurrent_layers": [True, True, True, True], "block_count": 5,
        "rope.dimension_count": 64, "attention.head_count": 2, "full_attention_interval": 0,
    },
    "lfm2-moe-unscaled": {
        "shortconv.l_cache": 4, "attention.head_count_kv": [0, 0, 2, 0], "leading_dense_block_count": 2,
        "expert_count": 5, "expert_used_count": 9, "expert_feed_forward_length": 48, "block_count": 3,
        "attention.sliding_window": 5, "attention.head_count": 8, "feed_forward_length": 64,
    },
    "granite-hybrid-moe-still": {
        "ssm.conv_kernel": 3, "ssm.state_size": 16, "ssm.group_count": 3, "ssm.time_step_rank": 7,
        "ssm.inner_size": 96, "attention.head_count_kv": [0, 0, 2, 0], "expert_count": 5,
        "expert_used_count": 9, "expert_shared_feed_forward_length": 64, "block_count": 3,
        "attention.head_count": 8, "feed_forward_length": 48,
    },
    "falcon-h1": {
        "ssm.conv_kernel": 9, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.time_step_rank": 0,
        "ssm.inner_size": 256, "attention.head_count_kv": 3, "attention.key_length": 32, "block_count": 5,
        "feed_forward_length": 48, "embedding_length": 32,
    },
    "nemotron-h": {
        "ssm.conv_kernel": 1, "ssm.state_size": 48, "ssm.group_count": 4, "ssm.time_step_rank": 16,
        "ssm.inner_size": 100, "attention.head_count_kv": [0, 0, 2, 0, 0, 0], "block_count": 7,
        "feed_forward_length": [96, 96, 0, 0, 96, 0], "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": -1.0,
    },
    "deepseek-v3": {
        "attention.kv_lora_rank": 48, "attention.q_lora_rank": 16, "attention.key_length_mla": 16,
        "attention.value_length_mla": 16, "expert_count": 7, "expert_used_count": 9,
        "expert_shared_count": 2, "expert_feed_forward_length": 16, "expert_gating_func": 3,
        "expert_group_count": 3, "leading_dense_block_count": 2, "block_count": 4, "rope.dimension_count": 8,
        "attention.head_count": 3, "attention.temperature_scale": 0.1,
    },
    "minicpm3": {
        "attention.kv_lora_rank": 64, "attention.q_lora_rank": 16, "attention.key_length": 32,
        "block_count": 4, "rope.dimension_count": 8, "attention.head_count": 4, "embedding_length": 32,
    },
    "mixtral": {
        "expert_count": 3, "expert_used_count": 5, "feed_forward_length": 64, "attention.head_count": 8,
        "attention.head_count_kv": 1,
    },
    "granite-gguf": {
        "residual_scale": -1.0, "logit_scale": 0.0, "embedding_scale": float("nan"), "attention.scale": -0.5,
        "block_count": 4, "feed_forward_length": 64, "attention.head_count_kv": 1, "embedding_length": 32,
    },
    "cohere2-gguf": {
        "logit_scale": float("inf"), "attention.layer_norm_epsilon": -1.0, "attention.head_count": 3,
        "attention.sliding_window_pattern": [True], "block_count": 6, "rope.dimension_count": 24,
    },
    "gpt-neox-gguf": {
        "attention.head_count": 3, "rope.dimension_count": 17, "feed_forward_length": 64, "block_count": 4,
        "context_length": 0, "attention.layer_norm_epsilon": 0.0,
    },
    "glm4-moe": {
        "expert_count": 7, "expert_used_count": 9, "expert_group_count": 3, "expert_shared_count": 2,
        "expert_feed_forward_length": 48, "leading_dense_block_count": 2, "nextn_predict_layers": 3,
        "expert_weights_scale": -1.0, "block_count": 4, "attention.key_length": 32,
    },
    "ernie4.5-moe-gguf": {
        "expert_count": 7, "expert_used_count": 9, "interleave_moe_layer_step": 0, "block_count": 5,
        "leading_dense_block_count": 2, "expert_feed_forward_length": 32, "attention.head_count_kv": 3,
    },
    "granitemoe-shared": {
        "expert_shared_feed_forward_length": 64, "expert_count": 5, "expert_used_count": 0, "block_count": 2,
    },
    "hunyuan-moe-gguf": {"expert_count": 5, "expert_used_count": 7, "expert_feed_forward_length": 48},
    "minimax-m2": {"expert_count": 9, "expert_feed_forward_length": 48, "rope.dimension_count": 32},
}  # fmt: skip


def damaged(path: Path, family: str) -> Iterator[tuple[str, Path]]:
    """What is wrong, and a file with it."""
    whole, target = path.read_bytes(), path.with_name("damaged.gguf")
    for share in (0.02, 0.3, 0.6, 0.999):
        target.write_bytes(whole[: int(len(whole) * share)])
        yield f"the first {share} of it", target
    file = GGUFFile(path)
    architecture = file.metadata["general.architecture"]
    metadata, tensors = contents(file)
    for name in first_of_each_part(tensors):
        if name == "rope_freqs.weight":
            continue
        rest_of = {other: tensor for other, tensor in tensors.items() if other != name}
        # Without a head the embedding is one.
        if name != "output.weight":
            write_file(target, metadata, architecture, rest_of)
            yield f"no {name}", target
        # The numbers of tokens follow from these.
        if name not in ("token_embd.weight", "per_layer_token_embd.weight"):
            twice = np.repeat(tensors[name], 2, axis=0)
            write_file(target, metadata, architecture, {**rest_of, name: twice})
            yield f"{name} of twice as many rows", target
    write_file(target, metadata, architecture, {**tensors, "blk.0.attn_other.weight": np.ones(3, "<f4")})
    yield "a tensor that there is not", target
    for name, value in CONTRADICTIONS[family].items():
        write_file(target, {**metadata, f"{architecture}.{name}": value}, architecture, tensors)
        yield f"{name} of {value}", target


@rest(SECONDS)
@pytest.mark.parametrize("family", CONTRADICTIONS)
def test_damaged_and_misfitting_files_are_one_error(tmp_path: Path, family: str) -> None:
    make_family(family, tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    count = 0
    for wrong, path in damaged(tmp_path / "m.gguf", family):
        count += 1
        try:
            load(path)
        except ConfigError as error:
            assert "\n" not in str(error), wrong
        else:
            pytest.fail(f"a file with {wrong} was read")
    assert count >= 20


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_rows_and_columns_in_another_order_stay_quantised(tmp_path: Path, kind: str) -> None:
    """Of the delta rule: heads of values are stored in another order, and of its output the columns are."""
    sizes = {"linear_value_head_dim": 32, "linear_key_head_dim": 32, "intermediate_size": 96}
    make_family("qwen3.5", tmp_path / "hf", **sizes)
    original = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind)
    found = open_checkpoint(tmp_path / "m.gguf").tensors()
    layer = "model.layers.0.linear_attn"
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"):
        name = f"{layer}.{part}.weight"
        assert found.rounding(name) is not None
        read = found.read(name)
        torch.testing.assert_close(dequantised(found.quantised(name)), read, rtol=1e-6, atol=1e-6)
        kinds = gguf.GGMLQuantizationType[kind]
        expected = gguf.dequantize(gguf.quants.quantize(original[name].numpy(), kinds), kinds)
        # Rows are quantised alone, and groups of 32 are within a head.
        assert np.array_equal(read.numpy(), expected)


def test_columns_whose_groups_are_torn_apart_are_dequantised(tmp_path: Path) -> None:
    """Heads of 48 elements in groups of 32."""
    make_family("qwen3.5", tmp_path / "hf", intermediate_size=96)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "Q8_0")
    found = open_checkpoint(tmp_path / "m.gguf").tensors()
    assert found.rounding("model.layers.0.linear_attn.in_proj_z.weight") is not None
    assert found.rounding("model.layers.0.linear_attn.out_proj.weight") is None


def test_experts_of_old_files_are_one_by_one(tmp_path: Path) -> None:
    oracle = make_family("mixtral", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    metadata, tensors = contents(GGUFFile(tmp_path / "m.gguf"))
    old = {
        name.replace("_exps", f".{at}"): tensor
        for name, stack in tensors.items()
        for at, tensor in (enumerate(stack) if "_exps" in name else [(0, stack)])
    }
    write_file(tmp_path / "old.gguf", metadata, "llama", old)
    assert_greedy(tmp_path / "old.gguf", PROMPTS, 6, oracle)


def test_layers_that_predict_further_tokens_have_transformers_names(tmp_path: Path) -> None:
    """They are the last blocks of a file; a model without such layers leaves them."""
    oracle = make_family("qwen3.5", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    metadata, tensors = contents(GGUFFile(tmp_path / "m.gguf"))
    block = {name.replace("blk.1.", "blk.4."): tensor for name, tensor in tensors.items() if "blk.1." in name}
    own = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head_norm": (64,)}
    block |= {f"blk.4.nextn.{name}.weight": np.ones(shape, "<f4") for name, shape in own.items()}
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    recurrent = {"qwen35.attention.recurrent_layers": [True, False, True, True, False]}
    write_file(tmp_path / "mtp.gguf", {**metadata, **more, **recurrent}, "qwen35", {**tensors, **block})
    checkpoint = open_checkpoint(tmp_path / "mtp.gguf")
    config, found = checkpoint.config(), checkpoint.tensors()
    assert (config["num_hidden_layers"], config["mtp_num_hidden_layers"]) == (4, 1)
    further = {name for name in found.names if name.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"} <= further
    assert "mtp.layers.0.self_attn.q_proj.weight" in further
    assert not found.read("mtp.norm.weight").any(), "norms are stored plus one"
    assert_greedy(tmp_path / "mtp.gguf", PROMPTS, 6, oracle)


@pytest.mark.parametrize("family", ["qwen3.5", "glm4-moe"])
@pytest.mark.parametrize("further", [0, 1])
def test_layers_that_a_file_does_not_state_are_an_error(tmp_path: Path, family: str, further: int) -> None:
    """They would be left out without a word, as those that predict further tokens are."""
    make_family(family, tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    (metadata, tensors), name = contents(file), file.metadata["general.architecture"]
    count = metadata[f"{name}.block_count"]
    stated = {f"{name}.block_count": count - 1 + further, f"{name}.nextn_predict_layers": further}
    write_file(tmp_path / "few.gguf", {**metadata, **stated}, name, tensors)
    with pytest.raises(ConfigError, match=f"blk.{count - 1}"):
        load(tmp_path / "few.gguf")


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2", "llama"])
def test_absurd_numbers_of_layers_take_no_memory(tmp_path: Path, architecture: str) -> None:
    """2**32 - 1 took 32 GiB in a list of them."""
    sizes = {"block_count": 2**32 - 1, "embedding_length": 32, "context_length": 64}
    sizes |= {"attention.head_count": 1, "ssm.time_step_rank": 1, "ssm.inner_size": 32, "ssm.conv_kernel": 4}
    sizes |= {"ssm.state_size": 16, "ssm.group_count": 1, "shortconv.l_cache": 3}
    stated = {f"{architecture}.{key}": value for key, value in sizes.items()}
    stated |= {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5}
    write_file(tmp_path / "many.gguf", stated, architecture)
    with pytest.raises(ConfigError, match="4294967295 layers"):
        open_checkpoint(tmp_path / "many.gguf").config()


def test_experts_that_no_memory_can_hold_are_an_error(tmp_path: Path) -> None:
    make_family("mixtral", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    metadata, tensors = contents(GGUFFile(tmp_path / "m.gguf"))
    stated = {**metadata, "llama.feed_forward_length": 2**31 - 1}
    write_file(tmp_path / "wide.gguf", stated, "llama", tensors)
    with pytest.raises(ConfigError, match="no memory for weights shaped"):
        load(tmp_path / "wide.gguf")


def test_a_gate_of_one_row_may_have_lost_it(tmp_path: Path) -> None:
    """llama.cpp's quantiser drops dimensions of 1."""
    oracle = make_family("qwen3.5-moe", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    metadata, tensors = contents(GGUFFile(tmp_path / "m.gguf"))
    flat = {name: tensor[0] if "inp_shexp" in name else tensor for name, tensor in tensors.items()}
    write_file(tmp_path / "flat.gguf", metadata, "qwen35moe", flat)
    assert_greedy(tmp_path / "flat.gguf", PROMPTS, 6, oracle)


def test_a_quantised_table_of_inputs_by_layer_stays_so(tmp_path: Path) -> None:
    """Native code reads from it the rows of a step's tokens."""
    require("native")
    make_family("gemma4-shared", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    metadata, tensors = contents(GGUFFile(tmp_path / "m.gguf"))
    kind, name = gguf.GGMLQuantizationType.Q8_0, "per_layer_token_embd.weight"
    rounded = gguf.quants.quantize(tensors[name], kind)
    write_file(tmp_path / "q.gguf", metadata, "gemma4", {**tensors, name: (rounded, kind)})
    write_file(tmp_path / "wide.gguf", metadata, "gemma4", {**tensors, name: gguf.dequantize(rounded, kind)})
    models = [load(tmp_path / file, kernels="native") for file in ("q.gguf", "wide.gguf")]
    assert "8 bits as they are stored" in models[0].spec.layer_reason
    assert torch.equal(*map(prompt_logits, models))
    # Other weights, as they are stored.
    other = {part: tensor[::-1].copy() if part == name else tensor for part, tensor in tensors.items()}
    rounded = gguf.quants.quantize(other[name], kind)
    write_file(tmp_path / "other.gguf", metadata, "gemma4", {**other, name: (rounded, kind)})
    prepare_update(models[0], tmp_path / "other.gguf", lambda: None).install()
    fresh = load(tmp_path / "other.gguf", kernels="native")
    assert torch.equal(prompt_logits(models[0]), prompt_logits(fresh))
    assert not torch.equal(prompt_logits(fresh), prompt_logits(models[1]))
