"""What llama.cpp's converter makes of models with state spaces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["STATE_SPACES"]

_Tensors = dict[str, torch.Tensor]
_HEADS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON_HEADS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def _add_sizes(writer: Any, config: dict[str, Any], names: tuple[str, ...]) -> None:
    heads, size, groups, state, kernel = (config[name] for name in names)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_time_step_rank(heads)


def _state_space(tensors: _Tensors, groups: int) -> _Tensors:
    """Heads and groups are columns, and A is what it stands for."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            found[name] = -tensor.exp()[:, None]
        elif name.endswith((".mamba.D", ".mixer.D")):
            found[name] = tensor[:, None]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            found[name] = tensor.view(groups, -1)
        elif name.endswith("conv1d.weight"):
            found[name] = tensor.squeeze(1)
        else:
            found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def _granite(writer: Any, config: dict[str, Any]) -> None:
    _add_sizes(writer, config, _HEADS)
    heads, types = config["num_key_value_heads"], config["layer_types"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in types])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def _granite_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    """Gates and inputs are in tensors of their own."""
    found, end = {}, "_shexp" if config["num_local_experts"] else ""
    for name, tensor in _state_space(tensors, config["mamba_n_groups"]).items():
        match = re.match(r"model\.layers\.(\d+)\.(shared_mlp|block_sparse_moe)\.(in|out)put_linear", name)
        if match is None:
            found[name] = tensor
            continue
        kind = end if match[2] == "shared_mlp" else "_exps"
        parts = ("gate", "up") if match[3] == "in" else ("down",)
        for part, values in zip(parts, tensor.chunk(len(parts), dim=-2), strict=True):
            found[f"blk.{match[1]}.ffn_{part}{kind}.weight"] = values
    return found


def _falcon(writer: Any, config: dict[str, Any]) -> None:
    _add_sizes(writer, config, _HEADS)


def _falcon_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    """Factors are in the weights."""
    found = _state_space(tensors, config["mamba_n_groups"])
    inner, of_group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = torch.tensor([inner, inner, of_group, of_group, config["mamba_n_heads"]])
    into = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes) * config["ssm_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    inputs = config["attention_in_multiplier"]
    factors: dict[str, Any] = {
        "in_proj.weight": into[:, None], "out_proj.weight": config["ssm_out_multiplier"],
        "q_proj.weight": inputs, "k_proj.weight": inputs * config["key_multiplier"], "v_proj.weight": inputs,
        "o_proj.weight": config["attention_out_multiplier"], "gate_proj.weight": gate,
        "down_proj.weight": down, "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }  # fmt: skip
    for name, tensor in found.items():
        factor = next((each for end, each in factors.items() if name.endswith(end)), 1.0)
        found[name] = tensor * factor
    norm = re.compile(r"model\.layers\.(\d+)\.pre_ff_layernorm\.weight")
    # The one name without "weight".
    return {norm.sub(r"blk.\1.ffn_norm", name): tensor for name, tensor in found.items()}


def _nemotron(writer: Any, config: dict[str, Any]) -> None:
    _add_sizes(writer, config, _NEMOTRON_HEADS)
    types, heads = config["layers_block_type"], config["num_key_value_heads"]
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in types])
    sizes = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in types])
    writer.add_expert_count(config["n_routed_experts"])
    if "moe" in types:
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])


def _nemotron_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    found = {}
    for stored, tensor in _state_space(tensors, config["n_groups"]).items():
        name = stored.replace(".e_score_correction_bias", ".e_score_correction.bias")
        if ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        found[name] = tensor
    return found


#: what writes further metadata, and what makes the stored tensors
STATE_SPACES: dict[str, tuple[Callable[..., None], Callable[..., _Tensors]]] = {
    "granitehybrid": (_granite, _granite_tensors),
    "falcon-h1": (_falcon, _falcon_tensors),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), (_nemotron, _nemotron_tensors)),
}
