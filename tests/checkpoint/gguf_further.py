"""What llama.cpp's converter makes of further architectures, which differ in names and numbers mostly."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoint.gguf_kinds import Kind
from tests.model.further_families import FURTHER, GRANITE, WIDE, rope

__all__ = ["ARCHITECTURES", "FAMILIES", "KINDS", "NEIGHBOURS", "usual_names"]

#: by model type
ARCHITECTURES = {
    "granite": "granite", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", "cohere": "command-r",
    "cohere2": "cohere2", "exaone4": "exaone4", "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe",
    "seed_oss": "seed_oss", "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2", "glm4_moe": "glm4moe", "dots1": "dots1", "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe", "starcoder2": "starcoder2", "gpt_neox": "gptneox", "stablelm": "stablelm",
    "phi": "phi2", "nemotron": "nemotron", "arcee": "arcee",
}  # fmt: skip
#: those whose rows of queries and keys are stored in another order
NEIGHBOURS = {"granite", "granitemoe", "arcee"}
_LAYER_NORMS = {"command-r", "cohere2", "starcoder2", "gptneox", "stablelm", "phi2", "nemotron"}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
#: families as tests/model/checkpoints.py has them, of what a file can hold
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: FURTHER[name]
        for name in (
            *("granitemoe", "granitemoe-shared", "cohere", "exaone4", "exaone4-global", "ernie4.5"),
            *("minimax-m2", "glm4-moe", "olmoe", "stablelm", "nemotron", "arcee"),
        )
    },
    "granite-gguf": ("Granite", GRANITE),
    # Four layers in five, one period.
    "cohere2-gguf": ("Cohere2", {**WIDE, "sliding_window": 9, "logit_scale": 0.3, "num_hidden_layers": 5}),
    "ernie4.5-moe-gguf": ("Ernie4_5_Moe",
        {**WIDE, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "num_hidden_layers": 4,
        "moe_num_shared_experts": 2}),
    "seed-oss-gguf": ("SeedOss", {**WIDE, "head_dim": 16}),
    "hunyuan-gguf": ("HunYuanDenseV1", {**WIDE, "head_dim": 16, **rope("default")}),
    "hunyuan-moe-gguf": ("HunYuanMoEV1",
        {**WIDE, "head_dim": 16, "num_experts": 6, "moe_topk": 2, **rope("default")}),
    "dots1-gguf": ("Dots1",
        {**WIDE, **_EXPERTS, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}),
    "qwen2-moe-gguf": ("Qwen2Moe",
        {**WIDE, **_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48}),
    "starcoder2-gguf": ("Starcoder2", WIDE),
    "gpt-neox-gguf": ("GPTNeoX", {"num_key_value_heads": None, **WIDE}),
    "phi2-gguf": ("Phi", {**WIDE, "num_key_value_heads": 4}),
}  # fmt: skip
_USUAL = {
    "layer_norm_eps": "norm_eps", "norm_epsilon": "norm_eps", "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok", "moe_topk": "num_experts_per_tok",
}  # fmt: skip
#: fields, and what writes them
_NUMBERS = {
    "attention_multiplier": "attention_scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "logit_scale": "logit_scale",
    "moe_layer_interval": "interleave_moe_layer_step", "moe_layer_start_index": "leading_dense_block_count",
    "first_k_dense_replace": "leading_dense_block_count", "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "use_parallel_residual": "parallel_residual",
    "routed_scaling_factor": "expert_weights_scale",
}  # fmt: skip


def usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """With sizes under the names that they have in most configs, too."""
    config = {**config, **{_USUAL[name]: value for name, value in config.items() if name in _USUAL}}
    return {"num_key_value_heads": config.get("num_attention_heads"), **config}


def _add(writer: Any, config: dict[str, Any]) -> None:
    for name, written in _NUMBERS.items():
        if config.get(name) is not None:
            getattr(writer, f"add_{written}")(config[name])
    if writer.arch in _LAYER_NORMS:
        writer.add_layer_norm_eps(config["norm_eps"])
    if writer.arch in ("cohere2", "exaone4") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if writer.arch == "exaone4" and config["sliding_window"]:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if writer.arch in ("minimax-m2", "hunyuan-moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if writer.arch in ("glm4moe", "dots1"):
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _placed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, stored in tensors.items():
        tensor = stored
        if "query_key_value" in name:
            heads = tensor.view(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
            tensor = heads.transpose(0, 1).reshape(tensor.shape)
        if config["model_type"] == "nemotron" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if "input_linear" in name:
            kind = "exps" if "block_sparse_moe" in name else "shexp"
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                found[f"blk.{name.split('.')[2]}.ffn_{part}_{kind}.weight"] = half
            continue
        found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found


KINDS = dict.fromkeys(ARCHITECTURES.values(), Kind(_add, _placed))
