"""llama (and Mistral, which converts to it), smollm3, olmo2 (and OLMo 3, which converts to it)."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import (
    POST_NORMS,
    Architecture,
    Common,
    biases,
    two_rotations,
    windows,
)
from aioinfer.errors import ConfigError

__all__ = ["ARCHITECTURES"]


def _llama(common: Common) -> dict[str, Any]:
    if common.value("expert_count", int, 0):
        raise ConfigError("model: GGUF files of Mixtral, which are Llama with experts, are not supported")
    return biases(common)


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
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, neighbours=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, neighbours=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, POST_NORMS),
}
