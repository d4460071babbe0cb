"""Registry: which architectures have an implementation of our own."""

from __future__ import annotations

from typing import Any

from aioinfer.model import rope
from aioinfer.model.dense import DenseLM

__all__ = ["own_implementation"]

#: architecture -> the model type whose config it reads, and our class
_OWN = {
    "LlamaForCausalLM": ("llama", DenseLM),
    "MistralForCausalLM": ("mistral", DenseLM),
    "Qwen2ForCausalLM": ("qwen2", DenseLM),
    "Qwen3ForCausalLM": ("qwen3", DenseLM),
    "Qwen3MoeForCausalLM": ("qwen3_moe", DenseLM),
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def own_implementation(config: Any) -> type[DenseLM] | None:
    """The class for a config, or None where transformers has to do it: an architecture of which we have
    no code, or a variant that ours does not compute."""
    model_type, implementation = _OWN.get(config.architectures[0], (None, None))
    computed = (
        config.model_type == model_type
        and rope.supported(config)
        and config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ()) <= _LAYER_TYPES
    )
    return implementation if computed else None
