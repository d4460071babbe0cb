"""glm4, phi3 and gpt2."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import NUMBER, Architecture, Common, partial_rotation
from aioinfer.errors import ConfigError

__all__ = ["ARCHITECTURES"]

_GLM = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _glm4(common: Common) -> dict[str, Any]:
    """Neighbours rotate together, for which transformers has rows of queries and keys in the same order."""
    sections = common.value("rope.dimension_sections", list, [])
    if any(sections) or common.value("nextn_predict_layers", int, 0):
        # Of GLM-4V, whose rows are in another order, and of GLM-OCR.
        raise ConfigError(
            "model: GGUF files of GLM-4 for images, or with layers for further tokens, are not supported"
        )
    return {"attention_bias": common.attention_bias, "rope_parameters": partial_rotation(common)}


def _phi3(common: Common) -> dict[str, Any]:
    return {
        "sliding_window": common.value("attention.sliding_window", int, 0) or None,
        "original_max_position_embeddings": common.value(
            "rope.scaling.original_context_length", int, common.context
        ),
        "rope_parameters": partial_rotation(common),
    }


def _gpt2(common: Common) -> dict[str, Any]:
    return {
        "n_layer": common.layers,
        "n_embd": common.hidden,
        "n_head": common.heads,
        "n_positions": common.context,
        "n_inner": common.value("feed_forward_length", int, 4 * common.hidden),
        "layer_norm_epsilon": float(common.value("attention.layer_norm_epsilon", NUMBER)),
    }


ARCHITECTURES = {
    "glm4": Architecture(
        *("glm4", "Glm4ForCausalLM", _glm4, _GLM),
        partial_rotary=True,
        ends=frozenset({"<|user|>", "<|observation|>"}),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, _PHI, partial_rotary=True),
    "gpt2": Architecture(
        *("gpt2", "GPT2LMHeadModel", _gpt2, _GPT2),
        layers="transformer.h",
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        epsilon="layer_norm_epsilon",
    ),
}
