"""llama (and Mistral and Mixtral), mistral3, smollm3, olmo2 (and OLMo 3)."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import (
    NEIGHBOURS,
    NUMBER,
    POST_NORMS,
    Architecture,
    Common,
    biases,
    two_rotations,
    windows,
)

__all__ = ["ARCHITECTURES"]


#: of Mixtral, whose experts old files have one by one
_LLAMA = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps.weight": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
    "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
    "ffn_gate.N.weight": "block_sparse_moe.experts.N.w1.weight",
    "ffn_up.N.weight": "block_sparse_moe.experts.N.w3.weight",
    "ffn_down.N.weight": "block_sparse_moe.experts.N.w2.weight",
}


def _llama(common: Common) -> dict[str, Any]:
    """Mixtral is Llama with experts."""
    if not (experts := common.value("expert_count", int, 0)):
        return biases(common)
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": common.value("expert_used_count", int),
        "sliding_window": None,
    }


def _mistral3(common: Common) -> dict[str, Any]:
    """Ministral 3 is Mistral with queries that grow with their position."""
    beta = float(common.value("attention.temperature_scale", NUMBER, 0.0))
    if not beta:
        return {"sliding_window": None}
    # Files have one of two numbers, which are the same in releases.
    scale = float(common.value("rope.scaling.yarn_log_multiplier", NUMBER, 0.0))
    return {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "sliding_window": None,
        "rope_parameters": {
            **common.rope, "mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta,
        },
    }  # fmt: skip


def _smollm3(common: Common) -> dict[str, Any]:
    # Which layers do not rotate is not in the metadata.
    return {**biases(common), "no_rope_layer_interval": 4, "use_sliding_window": False}


def _olmo2(common: Common) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with a window, and plain rotations where it applies."""
    stated = {"attention_bias": common.attention_bias}
    if not common.value("attention.sliding_window", int, 0):
        return stated
    return {
        **stated,
        **windows(common, default=0, period=4),
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": two_rotations(common, common.rope["rope_theta"]),
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, _LLAMA, rows=NEIGHBOURS),
    "mistral3": Architecture("mistral", "MistralForCausalLM", _mistral3, rows=NEIGHBOURS),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, rows=NEIGHBOURS),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, POST_NORMS),
}
