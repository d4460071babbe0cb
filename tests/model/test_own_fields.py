"""Fields of other families that a config states all the same: transformers' code does not read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from tests.model.checkpoints import assert_greedy, make_checkpoint
from tests.model.harness import load


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("lfm2", {"rms_norm_eps": 0.5}),
        ("lfm2-moe", {"rms_norm_eps": 0.5}),
        ("llama-gqa-tied", {"no_rope_layers": [0, 0, 1], "norm_eps": 0.5, "layer_norm_epsilon": 0.5}),
        ("gemma", {"final_logit_softcapping": 1.0, "query_pre_attn_scalar": 3}),
        ("mixtral", {"moe_intermediate_size": 16, "norm_eps": 0.5}),
        ("llama-gqa-tied", {"moe_intermediate_size": [1, 2], "num_experts_per_tok": []}),
        ("qwen3", {"num_experts_per_tok": 0, "moe_intermediate_size": 0, "no_rope_layers": [0, 0, 0]}),
    ],
)
def test_fields_of_another_family_are_not_read(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    oracle = make_checkpoint(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2]], 6, oracle)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("ernie4.5-moe", "model.mtp_block.0.self_attn.q_proj.weight"),
        ("ernie4.5-moe", "model.mtp_linear_proj.0.weight"),
        ("exaone-moe", "mtp.layers.0.eh_proj.weight"),
        ("mellum", "mtp.fc.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path, family: str, name: str) -> None:
    """transformers leaves them out, too."""
    oracle, file = make_checkpoint(family, tmp_path), tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(3)}, file, metadata={"format": "pt"})
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2]], 6, oracle, kernels="sdpa")


def test_kimi_k2_is_a_config_of_deepseek_v3(tmp_path: Path) -> None:
    oracle, file = make_checkpoint("deepseek-v3", tmp_path), tmp_path / "config.json"
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "kimi_k2", "auto_map": code}))
    assert not load(tmp_path).spec.fallback_reason
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2]], 6, oracle, kernels="sdpa")


def test_falcon_h1_with_another_activation_is_refused(tmp_path: Path) -> None:
    make_checkpoint("falcon-h1", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "gelu_new"}))
    with pytest.raises(ConfigError, match="the activation gelu_new is not supported"):
        load(tmp_path)
