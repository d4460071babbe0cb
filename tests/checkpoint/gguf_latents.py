"""What llama.cpp's converter makes of models with latents."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from tests.checkpoint.gguf_kinds import Kind
from tests.model.further_families import FURTHER, LATENT, LATENT_EXPERTS

__all__ = ["ARCHITECTURES", "FAMILIES", "KINDS"]

#: by model type
ARCHITECTURES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "minicpm3": "minicpm3",
}
#: families as tests/model/checkpoints.py has them, of what a file can hold
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: FURTHER[name] for name in ("deepseek-v2", "glm4-moe-lite", "minicpm3", "youtu")},
    "deepseek-v2-groups-gguf": ("DeepseekV2",
        {**LATENT, **LATENT_EXPERTS, "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "n_shared_experts": 2}),
}  # fmt: skip


def _deepseek2(writer: Any, config: dict[str, Any]) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if every := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * every)
    if config["model_type"] == "youtu":
        return
    sigmoids = config["model_type"] != "deepseek_v2"
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
    if sigmoids:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if groups := config["n_group"]:
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config["topk_group"])


def _deepseek2_tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Keys of heads are stored as what multiplies queries into the space of latents."""
    found, plain = {}, config["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
            layer = name.split(".")[2]
            found[f"blk.{layer}.attn_k_b.weight"] = heads[:, :plain].mT
            found[f"blk.{layer}.attn_v_b.weight"] = heads[:, plain:]
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = tensor
        else:
            found[name] = tensor
    return found


def _minicpm3(writer: Any, config: dict[str, Any]) -> None:
    rotated = config["qk_rope_head_dim"]
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + rotated)
    writer.add_rope_dimension_count(rotated)


KINDS = {
    "deepseek2": Kind(_deepseek2, _deepseek2_tensors),
    "minicpm3": Kind(_minicpm3, lambda tensors, config: tensors),
}
