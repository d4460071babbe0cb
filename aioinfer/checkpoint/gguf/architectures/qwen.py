"""qwen2, qwen3, qwen3moe, and the text part of qwen3vl."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import Architecture, Common

__all__ = ["ARCHITECTURES"]

_QWEN2 = {"use_sliding_window": False}
_QWEN3 = {"attention_bias": False, **_QWEN2}


def _qwen3moe(common: Common) -> dict[str, Any]:
    return {
        **_QWEN3,
        "num_experts": common.value("expert_count", int),
        "num_experts_per_tok": common.value("expert_used_count", int),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
        # The architecture always does so; transformers' default is not to.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


ARCHITECTURES = {
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", lambda _: _QWEN2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", lambda _: _QWEN3),
    # In a text all positions of M-RoPE are the same, and so it is Qwen3.
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", lambda _: _QWEN3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
}
