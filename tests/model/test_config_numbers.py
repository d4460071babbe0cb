"""Numbers of a config: strict where our own code reads them, transformers' affair elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioinfer.errors import ConfigError
from aioinfer.model.architecture import own_fields
from aioinfer.model.config_check import check_numbers
from tests.model.checkpoints import RECURRENT, assert_greedy, make_model


@pytest.mark.parametrize(
    "stated",
    [
        {"model_type": "granitemoehybrid", "num_experts_per_tok": 0, "num_local_experts": 0},
        {"model_type": "hunyuan_v1_moe", "moe_intermediate_size": [64, 64], "num_experts_per_tok": [2, 2]},
        {"model_type": "gemma3n_text", "intermediate_size": [64, 128], "head_dim": 0},
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0, "norm_eps": "small"},
        {"model_type": "unheard_of", "intermediate_size": 0, "num_key_value_heads": -1},
        # Fields that the family does not have, and experts where there are none.
        {"model_type": "llama", "moe_intermediate_size": 0, "num_experts_per_tok": [], "conv_L_cache": -3},
        {"model_type": "qwen3_moe", "num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0},
        {"model_type": "mistral3", "text_config": {"model_type": "ministral", "intermediate_size": [3]}},
        # As in all releases of Falcon-H1.
        {"model_type": "falcon_h1", "rope_theta": 100000000000.0},
    ],
)
def test_numbers_that_no_code_of_ours_needs_are_left_to_transformers(stated: dict[str, Any]) -> None:
    check_numbers(stated, own_fields)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"model_type": "llama", "intermediate_size": 0}, r"^model: intermediate_size in .* integer in \[1,"),
        ({"model_type": "llama", "intermediate_size": [64]}, "intermediate_size"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"model_type": "llama", "rope_scaling": {"factor": 0}}, r"rope_scaling\.factor"),
        (
            {"model_type": "x", "text_config": {"model_type": "qwen3", "head_dim": []}},
            r"text_config\.head_dim",
        ),
        (
            {"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": 0}}},
            r"per_layer_config\.0\.head_dim",
        ),
        # Of these, all memory would be taken.
        (
            {"model_type": "bloom", "num_hidden_layers": 10**9},
            "num_hidden_layers in config.json must be 10000 at most",
        ),
        ({"model_type": "hunyuan_v1_moe", "moe_intermediate_size": [64, 10**12]}, "moe_intermediate_size"),
        ({"model_type": "granite", "max_position_embeddings": float("nan")}, "max_position_embeddings"),
    ],
)
def test_numbers_that_no_model_can_have_are_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_numbers(stated, own_fields)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_shared_expert_of_no_size_is_none(tmp_path: Path) -> None:
    """Also where modules are watched for adapters."""
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    oracle = make_model("Qwen2Moe", {**changes, "shared_expert_intermediate_size": 0}, tmp_path, seed=1)
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5], [9, 2]], 6, oracle, max_lora_rank=8)


def test_sizes_may_be_a_list_with_one_for_each_layer(tmp_path: Path) -> None:
    changes = {"num_experts": 4, "moe_topk": [2, 1, 2], "moe_intermediate_size": [32, 32, 32], "head_dim": 16}
    oracle = make_model("HunYuanMoEV1", changes, tmp_path, seed=1)
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5], [9, 2]], 6, oracle)


def test_rotations_may_be_as_slow_as_those_of_falcon_h1(tmp_path: Path) -> None:
    _, changes = RECURRENT["falcon-h1"]
    rotation = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}}
    oracle = make_model("FalconH1", {**changes, **rotation}, tmp_path, seed=1)
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5], [9, 2]], 6, oracle, kernels="sdpa")
