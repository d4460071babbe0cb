"""Registry: which architectures have an implementation of our own."""

from __future__ import annotations

from typing import Any

from aioinfer.model import rope
from aioinfer.model.dense import DenseLM

__all__ = ["own_implementation"]

_OWN = {
    "LlamaForCausalLM": DenseLM,
    "MistralForCausalLM": DenseLM,
    "Qwen2ForCausalLM": DenseLM,
    "Qwen3ForCausalLM": DenseLM,
}


def own_implementation(config: Any) -> type[DenseLM] | None:
    """The class for a config, or None where transformers has to do it: an architecture of which we have
    no code, or a variant that ours does not compute."""
    implementation = _OWN.get(config.architectures[0])
    if implementation is None or not rope.supported(config) or config.hidden_act != "silu":
        return None
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return implementation if partial == 1.0 else None
