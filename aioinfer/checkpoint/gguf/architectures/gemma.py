"""gemma, gemma2 and gemma3 (text)."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import (
    DEFAULT_BASE,
    FOUR_NORMS,
    LESS_ONE,
    NUMBER,
    Architecture,
    Common,
    soft_cap,
    two_rotations,
    windows,
)
from aioinfer.errors import ConfigError

__all__ = ["ARCHITECTURES"]


def _gemma(common: Common) -> dict[str, Any]:
    gate = "gelu_pytorch_tanh"
    return {"hidden_act": gate, "hidden_activation": gate, "attention_bias": common.attention_bias}


def _gemma2(common: Common) -> dict[str, Any]:
    return {
        **_gemma(common),
        **windows(common, default=4096, period=2),
        "query_pre_attn_scalar": _query_scalar(common, largest=46),
        "attn_logit_softcapping": soft_cap(common, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": soft_cap(common, "final_logit_softcapping", 30.0),
    }


def _gemma3(common: Common) -> dict[str, Any]:
    return {
        **_gemma(common),
        **windows(common, default=0, period=6),
        "query_pre_attn_scalar": _query_scalar(common, largest=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": soft_cap(common, "final_logit_softcapping", 0.0),
        "rope_parameters": two_rotations(common, DEFAULT_BASE),
    }


def _query_scalar(common: Common, *, largest: int) -> int:
    """The number whose root divides queries: the size of a head, but hidden / heads in the largest model
    of a release, which is known by its number of layers."""
    if not common.has("attention.scale"):
        return common.hidden // common.heads if common.layers == largest else common.head_dim
    scale = float(common.value("attention.scale", NUMBER))
    scalar = round(scale**-2) if 0 < scale <= 1 else 0
    if scalar < 1 or abs(scalar**-0.5 - scale) > 1e-6 * scale:
        raise ConfigError(f"model: {common.prefix}.attention.scale of the GGUF file is {scale}")
    return scalar


ARCHITECTURES = {
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, values=LESS_ONE),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, FOUR_NORMS, values=LESS_ONE),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, FOUR_NORMS, values=LESS_ONE),
}
