"""Further architectures with experts: Granite, ERNIE 4.5, Hunyuan, MiniMax-M2, GLM-4.5, dots.llm1, Qwen2-MoE
and OLMoE."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import (
    NEIGHBOURS,
    NUMBER,
    Architecture,
    Common,
    Values,
    partial_rotation,
)
from aioinfer.checkpoint.gguf.architectures.dense import HUNYUAN_NORMS, granite_factors

__all__ = ["ARCHITECTURES"]

_PARTS = ("gate", "up", "down")


def _shared(name: str) -> dict[str, str]:
    """Names of the expert that all tokens use."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in _PARTS}


def _stacks(name: str) -> dict[str, str]:
    """Those of the tensors of all experts."""
    return {f"ffn_{part}_exps.weight": f"{name}.{part}_proj" for part in _PARTS}


_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_stacks("block_sparse_moe"),
    **_shared("shared_mlp"),
}
_ERNIE = {
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    **_shared("mlp.shared_experts"),
}
_HUNYUAN = {**HUNYUAN_NORMS, "ffn_gate_inp": "mlp.gate.wg", **_shared("mlp.shared_mlp")}
_MINIMAX = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
    **_stacks("block_sparse_moe.experts"),
}
_DOTS = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **_shared("mlp.shared_experts"),
}
_GLM = {
    **_DOTS,
    "post_attention_norm": "post_attention_layernorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_QWEN2 = {**_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
# llama.cpp's quantiser drops a dimension of 1.
_ONE_ROW: dict[str, Values] = dict.fromkeys(
    ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias"), lambda tensor: tensor.reshape(1, -1)
)


def _count(common: Common) -> int:
    found: int = common.value("expert_count", int)
    return found


def _used(common: Common) -> int:
    found: int = common.value("expert_used_count", int)
    return found


def _middle(common: Common) -> int:
    found: int = common.value("expert_feed_forward_length", int)
    return found


def _granite(common: Common) -> dict[str, Any]:
    stated = {
        **granite_factors(common),
        "num_local_experts": _count(common),
        "num_experts_per_tok": _used(common),
    }
    if not (shared := common.value("expert_shared_feed_forward_length", int, 0)):
        return stated
    return {
        **stated,
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": shared,
    }


def _ernie(common: Common) -> dict[str, Any]:
    ups = (tensor for name, tensor in common.file.tensors.items() if name.endswith(".ffn_up_shexp.weight"))
    # The metadata have another size of it.
    shared, middle = next(ups, None), _middle(common)
    return {
        "use_bias": common.attention_bias,
        "moe_num_experts": _count(common),
        "moe_k": _used(common),
        "moe_intermediate_size": middle,
        "moe_num_shared_experts": 0 if shared is None else shared.shape[0] // max(middle, 1),
        "moe_layer_start_index": common.value("leading_dense_block_count", int, 0),
        "moe_layer_interval": common.value("interleave_moe_layer_step", int, 1),
    }


def _hunyuan(common: Common) -> dict[str, Any]:
    return {
        "attention_bias": common.attention_bias,
        "num_experts": _count(common),
        "moe_topk": _used(common),
        "intermediate_size": _middle(common),
    }


def _minimax(common: Common) -> dict[str, Any]:
    return {
        "num_local_experts": _count(common),
        "num_experts_per_tok": _used(common),
        "intermediate_size": _middle(common),
        "rope_parameters": partial_rotation(common),
    }


def _dots(common: Common) -> dict[str, Any]:
    return {
        "attention_bias": common.attention_bias,
        "n_routed_experts": _count(common),
        "num_experts_per_tok": _used(common),
        "moe_intermediate_size": _middle(common),
        "n_shared_experts": common.value("expert_shared_count", int, 0),
        "first_k_dense_replace": common.value("leading_dense_block_count", int, 0),
        "routed_scaling_factor": float(common.value("expert_weights_scale", NUMBER, 1.0)),
        "norm_topk_prob": common.value("expert_weights_norm", bool, False),
        "n_group": common.value("expert_group_count", int, 1),
        "topk_group": common.value("expert_group_used_count", int, 1),
        # Of dots.llm1, whose releases have none.
        "sliding_window": None,
    }


def _glm(common: Common) -> dict[str, Any]:
    return {
        **_dots(common),
        "norm_topk_prob": common.value("expert_weights_norm", bool, True),
        "use_qk_norm": common.any(".attn_q_norm.weight"),
        "num_nextn_predict_layers": common.value("nextn_predict_layers", int, 0),
        "rope_parameters": partial_rotation(common),
    }


def _qwen2(common: Common) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "qkv_bias": common.attention_bias,
        "num_experts": _count(common),
        "num_experts_per_tok": _used(common),
        "moe_intermediate_size": _middle(common),
        "shared_expert_intermediate_size": common.value("expert_shared_feed_forward_length", int),
        "norm_topk_prob": common.value("expert_weights_norm", bool, False),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(common: Common) -> dict[str, Any]:
    return {
        "attention_bias": common.attention_bias,
        "num_experts": _count(common),
        "num_experts_per_tok": _used(common),
        "norm_topk_prob": common.value("expert_weights_norm", bool, False),
        "clip_qkv": None,
    }


ARCHITECTURES = {
    "granitemoe": Architecture("granitemoe", "GraniteMoeForCausalLM", _granite, _GRANITE, rows=NEIGHBOURS),
    "ernie4_5-moe": Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _ernie, _ERNIE, values=_ONE_ROW),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _hunyuan, _HUNYUAN),
    "minimax-m2": Architecture("minimax_m2", "MiniMaxM2ForCausalLM", _minimax, _MINIMAX, partial_rotary=True),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", _dots, _DOTS),
    "glm4moe": Architecture(
        *("glm4_moe", "Glm4MoeForCausalLM", _glm, _GLM),
        partial_rotary=True,
        ends=frozenset({"<|user|>", "<|observation|>"}),
    ),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2, _QWEN2, values=_ONE_ROW),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", _olmoe),
}
