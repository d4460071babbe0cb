"""Models with recurrent layers: Qwen3-Next and Qwen3.5 (the gated delta rule), LFM2 (short convolutions)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.gguf.architectures.base import (
    FULL,
    LESS_ONE,
    NUMBER,
    Architecture,
    Common,
    Order,
    Values,
    partial_rotation,
    per_layer,
)
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["ARCHITECTURES"]

_DELTA_RULE, _CONV = "linear_attention", "conv"
_QWEN = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps.weight": "feed_forward.experts.gate_proj",
    "ffn_up_exps.weight": "feed_forward.experts.up_proj",
    "ffn_down_exps.weight": "feed_forward.experts.down_proj",
    "ffn_gate_up_exps.weight": "feed_forward.experts.gate_up_proj",
}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _log_rate(tensor: torch.Tensor) -> torch.Tensor:
    return (-tensor).log()


def _with_axis(tensor: torch.Tensor) -> torch.Tensor:
    """[channels, size] of a convolution as [channels, 1, size]."""
    return tensor[:, None]


def _one_row(tensor: torch.Tensor) -> torch.Tensor:
    # llama.cpp's quantiser drops a dimension of 1.
    return tensor.reshape(1, -1)


_VALUES: Mapping[str, Values] = {
    "linear_attn.norm.weight": _same,
    "A_log": _log_rate,
    "conv1d.weight": _with_axis,
    "shared_expert_gate.weight": _one_row,
    **LESS_ONE,
}


def _by_key_head(*, behind_keys: bool = False, single: bool = False) -> Order:
    """Heads of values that belong to one head of keys are side by side in transformers; stored are the first
    ones of all heads of keys, then the second ones. ``behind_keys``: after rows of queries and keys;
    ``single``: a head is one row."""

    def order(config: Mapping[str, Any], count: int) -> npt.NDArray[np.int64]:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = 1 if single else config["linear_value_head_dim"]
        start = 2 * keys * config["linear_key_head_dim"] if behind_keys else 0
        if count != start + values * size:
            raise ValueError(count)
        heads = np.arange(start, count).reshape(values // keys, keys, size)
        return np.concatenate((np.arange(start), heads.swapaxes(0, 1).ravel()))

    return order


_ROWS: Mapping[str, Order] = {
    "in_proj_qkv.weight": _by_key_head(behind_keys=True),
    "conv1d.weight": _by_key_head(behind_keys=True),
    "in_proj_z.weight": _by_key_head(),
    **dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), _by_key_head(single=True)),
}
_COLUMNS: Mapping[str, Order] = {"linear_attn.out_proj.weight": _by_key_head()}


def _qwen3next(common: Common) -> dict[str, Any]:
    values = common.value("ssm.time_step_rank", int)
    inner = common.value("ssm.inner_size", int)
    if values < 1 or inner % values:
        raise ConfigError(f"model: {inner} elements of {values} heads of values in the GGUF file")
    further = common.value("nextn_predict_layers", int, 0)
    return {
        "layer_types": _delta_rule_layers(common),
        "attention_bias": common.attention_bias,
        "linear_conv_kernel_dim": common.value("ssm.conv_kernel", int),
        "linear_key_head_dim": common.value("ssm.state_size", int),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": common.value("ssm.group_count", int),
        "linear_num_value_heads": values,
        "rope_parameters": partial_rotation(common),
        **({"mtp_num_hidden_layers": further} if further else {}),
        **_experts(common),
    }


def _delta_rule_layers(common: Common) -> list[str]:
    """All but every fourth, unless the file states another period, or says it of each layer."""
    period = common.value("full_attention_interval", int, 4)
    if period < 1:
        raise ConfigError(f"model: {common.prefix}.full_attention_interval of the GGUF file is {period}")
    if common.has("attention.recurrent_layers"):
        recurrent = per_layer(common, "attention.recurrent_layers")
    else:
        recurrent = [(layer + 1) % period for layer in range(common.layers)]
    return [_DELTA_RULE if each else FULL for each in recurrent]


def _experts(common: Common) -> dict[str, Any]:
    if not common.value("expert_count", int, 0):
        return {}
    return {
        "num_experts": common.value("expert_count", int),
        "num_experts_per_tok": common.value("expert_used_count", int),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": common.value("expert_shared_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _lfm2(common: Common) -> dict[str, Any]:
    if common.value("attention.sliding_window", int, 0):
        raise ConfigError("model: GGUF files of LFM2 with an attention window are not supported")
    heads = per_layer(common, "attention.head_count_kv")
    return {
        "layer_types": [FULL if each else _CONV for each in heads],
        "norm_eps": float(common.value("attention.layer_norm_rms_epsilon", NUMBER)),
        "conv_L_cache": common.value("shortconv.l_cache", int),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(common: Common) -> dict[str, Any]:
    return {
        **_lfm2(common),
        "num_dense_layers": common.value("leading_dense_block_count", int, 0),
        "num_experts": common.value("expert_count", int),
        "num_experts_per_tok": common.value("expert_used_count", int),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
        "use_expert_bias": common.any(".exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": float(common.value("expert_weights_scale", NUMBER, 1.0)) or 1.0,
    }


def _qwen(model_type: str, name: str, **more: Any) -> Architecture:
    return Architecture(
        *(model_type, name, _qwen3next, _QWEN),
        partial_rotary=True,
        values=_VALUES,
        further="mtp.layers",
        **more,
    )


_CONV_VALUES: Mapping[str, Values] = {"conv.conv.weight": _with_axis}
ARCHITECTURES = {
    "qwen3next": _qwen("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": _qwen("qwen3_5_text", "Qwen3_5ForCausalLM", rows=_ROWS, columns=_COLUMNS),
    "qwen35moe": _qwen("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", rows=_ROWS, columns=_COLUMNS),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2, _LFM2, values=_CONV_VALUES),
    "lfm2moe": Architecture("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2moe, _LFM2, values=_CONV_VALUES),
}
