"""gpt-oss."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import Architecture, Common, windows

__all__ = ["ARCHITECTURES"]

_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    # Transformers has both in one tensor, in which they alternate.
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _gpt_oss(common: Common) -> dict[str, Any]:
    return {
        **windows(common, default=0, period=2),
        "attention_bias": True,
        "num_local_experts": common.value("expert_count", int),
        "num_experts_per_tok": common.value("expert_used_count", int),
        "intermediate_size": common.value("expert_feed_forward_length", int),
        # The metadata cannot say so; the releases do.
        "rope_parameters": {**common.rope, "truncate": False},
    }


ARCHITECTURES = {"gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _NAMES)}
