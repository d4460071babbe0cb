"""What llama.cpp's converter makes of single architectures: further metadata, and tensors that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.checkpoint.gguf_state_spaces import STATE_SPACES

__all__ = ["KINDS", "Kind"]

_Tensors = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """An architecture's part of a converter."""

    #: writes further metadata
    add: Callable[[Any, dict[str, Any]], None]
    #: tensors as they are stored: under names for which the package gguf has places, or under those of places
    placed: Callable[[_Tensors, dict[str, Any]], _Tensors]


def _gpt_oss(writer: Any, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _gpt_oss_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    """Gates and inputs, which alternate, each in a stack of its own, as the rows of matrices."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            rows = tensor.mT
            found[name.replace("gate_up_proj", "gate_proj.weight")] = rows[:, ::2]
            found[name.replace("gate_up_proj", "up_proj.weight")] = rows[:, 1::2]
        elif name.endswith("gate_up_proj_bias"):
            found[name.replace("gate_up_proj_bias", "gate_proj.bias")] = tensor[:, ::2]
            found[name.replace("gate_up_proj_bias", "up_proj.bias")] = tensor[:, 1::2]
        elif name.endswith("down_proj"):
            found[f"{name}.weight"] = tensor.mT
        elif name.endswith("down_proj_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return found


def _gemma4(writer: Any, config: dict[str, Any]) -> None:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, count = config["num_kv_shared_layers"], config["num_hidden_layers"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    size = _of_layer(config, windows.index(False), "head_dim")
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    if config["use_double_wide_mlp"]:
        middle = config["intermediate_size"]
        writer.add_feed_forward_length([middle * (1 + (at >= count - shared)) for at in range(count)])
    heads = [_of_layer(config, at, "num_key_value_heads") for at in range(count)]
    if len(set(heads)) > 1:
        writer.add_head_count_kv(heads)
    if cap := config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(cap)
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(config["head_dim"])


def _of_layer(config: dict[str, Any], layer: int, name: str) -> int:
    """Transformers 5.17 states what differs by a name of its own."""
    own = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[name]
    full = config["layer_types"][layer] == "full_attention"
    stated: Any = config.get("per_layer_config", {}).get(str(layer), {}).get(name)
    found: int = stated or (full and config.get(own)) or config[name]
    return found


def _gemma4_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    """Those without "weight" have it; and the factors of rotations, endless where nothing rotates."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("router.scale"):
            found[f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"] = tensor
        elif name.endswith("per_expert_scale"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.scale"] = tensor
        else:
            found[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = tensor
    full = config["layer_types"].index("full_attention")
    half = _of_layer(config, full, "head_dim") // 2
    rotated = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    found["rope_freqs.weight"] = torch.tensor([1.0] * rotated + [1e30] * (half - rotated))
    return found


def _delta_rule(writer: Any, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 4)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _delta_rule_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    found = {}
    for name, stored in tensors.items():
        tensor = stored
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        elif "conv1d" in name:
            tensor = tensor.squeeze()
        if "in_proj_qkvz" in name:
            layer, group = name.split(".")[2], values // keys * size
            parts = torch.split(
                tensor.reshape(keys, -1, tensor.shape[1]), [key_size, key_size, group, group], dim=1
            )
            *qkv, gates = (part.flatten(0, 1) for part in parts)
            found[f"blk.{layer}.attn_qkv.weight"] = torch.cat(qkv)
            found[f"blk.{layer}.attn_gate.weight"] = gates
            continue
        if config["model_type"] != "qwen3_next":
            tensor = _by_place(name, tensor, keys, values, 2 * keys * key_size, size)
        found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def _by_place(
    name: str, tensor: torch.Tensor, keys: int, values: int, before: int, size: int
) -> torch.Tensor:
    """With the first heads of values of all heads of keys in front, then the second ones; ``before``: rows of
    queries and keys."""
    group = values // keys
    if any(part in name for part in ("in_proj_z.", "in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
        return tensor.reshape(keys, group, -1).transpose(0, 1).reshape(tensor.shape)
    if "in_proj_qkv." in name or "conv1d" in name:
        moved = tensor[before:].reshape(keys, group, -1).transpose(0, 1).reshape(tensor[before:].shape)
        return torch.cat((tensor[:before], moved))
    if "linear_attn.out_proj." in name:
        return tensor.reshape(-1, keys, group, size).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _lfm2(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_experts" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        return
    middle = int(2 * config["intermediate_size"] / 3)
    unit = config["block_multiple_of"]
    writer.add_feed_forward_length(-(-middle // unit) * unit)


def _lfm2_tensors(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    return {
        name.replace(".expert_bias", ".expert_bias.bias"): tensor.squeeze(1)
        if "conv.conv" in name
        else tensor
        for name, tensor in tensors.items()
    }


def _same(tensors: _Tensors, config: dict[str, Any]) -> _Tensors:
    return tensors


KINDS = {
    "gpt-oss": Kind(_gpt_oss, _gpt_oss_tensors),
    "gemma4": Kind(_gemma4, _gemma4_tensors),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), Kind(_delta_rule, _delta_rule_tensors)),
    **dict.fromkeys(("lfm2", "lfm2moe"), Kind(_lfm2, _lfm2_tensors)),
    **{name: Kind(*parts) for name, parts in STATE_SPACES.items()},
}
